// Counters of a mixture's experts on two devices for llama-server's /metrics. Hook of patch 0011.
#pragma once

#include "expert_totals.h"

#include <ostream>

// In Prometheus's text format, by device; nothing where no model has such experts.
inline void oa_add_expert_metrics(std::ostream & out) {
    struct counter {
        const char * name;
        const char * what;
        int64_t oa_expert_totals::*value;
    };
    static constexpr counter counters[] = {
        { "expert_uses_total", "Uses of experts in layers whose experts are on the device and on the host",
          &oa_expert_totals::uses },
        { "expert_hits_total", "Uses of those that the device computed", &oa_expert_totals::hits },
        { "expert_uploads_total", "Experts that were uploaded to slots of the device", &oa_expert_totals::uploads },
        { "expert_uploaded_bytes_total", "Bytes of these uploads", &oa_expert_totals::uploaded_nbytes },
    };
    const std::vector<oa_expert_totals> totals = oa_expert_totals_by_device();
    if (totals.empty()) {
        return;
    }
    for (const auto & [name, what, value] : counters) {
        out << "# HELP llamacpp:" << name << " " << what << "\n# TYPE llamacpp:" << name << " counter\n";
        for (const oa_expert_totals & of_device : totals) {
            out << "llamacpp:" << name << "{device=\"" << of_device.device << "\"} " << of_device.*value << "\n";
        }
    }
}
