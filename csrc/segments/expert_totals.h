// What was counted of experts on two devices, for whoever knows the device and not the model.
#pragma once

#include "llama.h"

#include <cstdint>
#include <string>
#include <vector>

// Of all models in this process, in decode, since they were loaded.
struct oa_expert_totals {
    std::string device; // the accelerator that has some of the experts
    int64_t     uses = 0, hits = 0, uploads = 0, uploaded_nbytes = 0;
};

// In the order of the devices' names; empty where no model has such experts.
LLAMA_API std::vector<oa_expert_totals> oa_expert_totals_by_device();
