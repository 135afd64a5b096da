// Exact memory of a model, context and backend map by the allocators' own dry run: no weight is loaded.
#pragma once

#include "llama.h"

#include <string>
#include <vector>

struct oa_buffer_bytes {
    std::string buffer_type; // "CUDA0"
    std::string device;      // the device behind it; "CPU" for host memory
    bool        is_host;
    size_t      weights;
    size_t      kv;
    size_t      compute;
};

// What is allocated in each buffer type; heads_guess: and what grows when MTP heads guess, which llama-server switches
// on in contexts that are there already. Throws std::runtime_error if the file cannot be loaded.
std::vector<oa_buffer_bytes> oa_memory_dry_run(const std::string & path, const llama_model_params & model_params,
                                               const llama_context_params & context_params, bool heads_guess = false);

// The same for a context that is really there.
std::vector<oa_buffer_bytes> oa_memory_of(const llama_context * context);
