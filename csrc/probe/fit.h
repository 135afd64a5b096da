// llama.cpp's own --fit: what it would choose for -ngl, -ts and -ot on the devices at hand. The code that decides is
// upstream's common/fit.cpp, compiled into this module from the patched source; nothing of it is repeated here.
#pragma once

#include "llama.h"

#include <string>
#include <vector>

struct oa_fit_override {
    std::string pattern; // regular expression on tensor names, as -ot takes it
    std::string buffer_type;
    std::string device;
};

struct oa_fit_result {
    std::string                  status;       // "success", "failure" (fit gave up) or "error" (no model, no context)
    int32_t                      n_gpu_layers; // -1: fit left the default, everything fits
    std::vector<float>           tensor_split; // one entry a device; all 0 if fit did not set it
    std::vector<oa_fit_override> overrides;    // in order, the first match wins
    uint32_t                     n_ctx;
    std::string                  reason; // why it is no success
    std::string                  log;    // fit's own lines, all levels
    std::string                  errors; // llama.cpp's errors meanwhile
};

// Runs common_fit_params on copies of the parameters in which everything fit decides has its default value.
// `margins`: bytes to leave free on each device, in the order of model_params.devices. `n_ctx_min` bounds the context
// that fit may choose when context_params.n_ctx is 0. One caller at a time: captures of llama.cpp's log take turns.
oa_fit_result oa_fit(const std::string & path, llama_model_params model_params, llama_context_params context_params,
                     std::vector<size_t> margins, uint32_t n_ctx_min);
