// Experts that come and go in slots of an accelerator while a model runs.
//
// A step is one graph. Between two of them, at a boundary, the tables of both sides change, and never while any context
// of the model computes: what leaves a slot leaves the tables first, then its slot is written in the background
// (slot_copier.h), and what was written enters the tables at a later boundary. So no graph reads a slot that is
// written, and both sides agree on who computes what. Graphs and their tensors stay the same.
// Prompts (more than oa_decode_tokens tokens) teach nothing and change nothing.
#pragma once

#include "expert_layer.h"
#include "slot_copier.h"

#include <deque>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

class oa_expert_slots {
  public:
    // layers: of a model, those without slots, too; they outlive this object.
    explicit oa_expert_slots(std::deque<oa_expert_layer> & layers);

    // A context's boundary, by its scheduler: it computes from now on, `n_tokens`. Returns why an upload failed.
    std::string step(ggml_backend_sched_t sched, int64_t n_tokens);

    // The context's computation has finished.
    void idle(ggml_backend_sched_t sched);

  private:
    struct cached_layer {
        oa_expert_layer *    layer;
        oa_expert_uses       uses;
        std::vector<int32_t> fresh;   // used since the last step of decode
        std::vector<int32_t> numbers; // on the accelerator, of all experts
        size_t               n_locked = 0;
        bool                 is_stale = false; // numbers are not in the tables yet
    };

    void        learn(cached_layer & layer);
    std::string publish(std::vector<oa_slot_upload> done);
    void        choose(std::vector<oa_slot_upload> & chosen);
    void        take(cached_layer & layer, const oa_slot_change & change, std::vector<oa_slot_upload> & chosen);
    void        show(cached_layer & layer, int32_t expert, size_t slot);
    void        hide(cached_layer & layer, int32_t expert);
    void        write_tables(ggml_backend_sched_t sched);
    void        write_device_table(ggml_tensor * table);

    std::optional<oa_slot_change> next_change(const cached_layer & layer);

    std::mutex                     mutex_;
    std::vector<cached_layer>      layers_;
    std::set<ggml_backend_sched_t> computing_;  // contexts
    size_t                         most_   = 0; // uploads at once
    size_t                         window_ = 1; // of them that the link has shown to finish in a step
    oa_slot_copier                 copier_;
};
