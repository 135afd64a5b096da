// Counters of guests for llama-server's /metrics: of the hot model, whose guests they are, and of a cold model, whose
// memory they are in (on the CPU). Hook of patch 0011.
#pragma once

#include "guest_totals.h"
#include "receiver_of_process.h"

#include <cstdlib>
#include <ostream>

// In Prometheus's text format; nothing where this process has no guests and lends no memory.
inline void oa_add_weave_metrics(std::ostream & out) {
    using namespace oa::weave;
    const auto head = [&](const char * name, const char * type, const char * what) {
        out << "# HELP llamacpp:" << name << " " << what << "\n# TYPE llamacpp:" << name << " " << type << "\n";
    };
    const auto one = [&](const char * name, const char * type, const char * what, auto value) {
        head(name, type, what);
        out << "llamacpp:" << name << " " << value << "\n";
    };
    if (getenv("OALLAMA_WEAVE_CHANNELS")) {
        static constexpr const char * causes[n_losses] = { "receiver failed", "memory called back", "no room",
                                                           "tokens shared" };
        const GuestTotals &           totals           = guest_totals();
        one("weave_guests", "gauge", "Sequences whose KV cache is with a cold model", totals.now.load());
        one("weave_guests_total", "counter", "Sequences that became guests", totals.came.load());
        head("weave_lost_guests_total", "counter", "Guests whose receiver has them no more, by cause");
        for (int i = 0; i < n_losses; ++i) {
            out << "llamacpp:weave_lost_guests_total{cause=\"" << causes[i] << "\"} " << totals.lost[i] << "\n";
        }
        one("weave_rows_total", "counter", "Rows of layers whose attention was computed elsewhere", totals.rows.load());
        one("weave_appended_rows_total", "counter", "Rows of layers of which K and V alone were sent",
            totals.appended_rows.load());
        one("weave_waited_seconds_total", "counter", "Waiting for receivers", 1e-9 * totals.waited_ns);
    }
    ReceiverStats stats;
    if (OA_OF_CPU(oa::weave::receiver_stats)(stats)) {
        one("weave_lent_bytes", "gauge", "Memory for guests of another model", stats.quota_nbytes);
        one("weave_used_bytes", "gauge", "Of it, memory that guests take", stats.quota_nbytes - stats.free_nbytes);
        one("weave_kept_guests", "gauge", "Guests whose KV cache is here", stats.n_sequences);
        one("weave_tasks_total", "counter", "Tasks of guests that were done", stats.n_tasks);
        one("weave_refused_tasks_total", "counter", "Of them, tasks that were refused", stats.n_refused);
        one("weave_senders_total", "counter", "Processes that came with guests", stats.n_epochs);
        one("weave_looks_total", "counter", "Looks of graphs' threads for tasks of guests, in 64s", stats.n_looks);
        one("weave_drains_total", "counter", "How often guests were asked to leave", stats.n_drains);
    }
}
