// The experts that a model's routers choose, read through llama.cpp's eval callback while the model runs.
//
// llama.cpp names the tensor of chosen experts "ffn_moe_topk-<layer>": i32 [experts used, tokens], mostly a view of a
// wider one. The scheduler waits for each of them, on any device, so nothing of this costs a run without the callback.
#pragma once

#include "ggml-backend.h"

#include <cstdint>
#include <vector>

struct oa_chosen_experts {
    int                  layer;
    int64_t              n_used;
    int64_t              n_tokens;
    std::vector<int32_t> ids; // [n_tokens, n_used], the router's first choice first
};

// What contexts whose callback this is have computed. One thread at a time.
class oa_expert_watch {
  public:
    // A ggml_backend_sched_eval_callback; `watch` is an oa_expert_watch.
    static bool callback(ggml_tensor * tensor, bool ask, void * watch);

    std::vector<oa_chosen_experts> take(); // in the order of computing; empties the list

  private:
    std::vector<oa_chosen_experts> seen_;
};
