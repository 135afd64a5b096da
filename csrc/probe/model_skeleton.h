// A model and a context of the real llama.cpp without a single weight loaded (no_alloc): real graphs, exact memory.
// Obeys the backend map of the calling thread, like a real load.
#pragma once

#include "llama-cpp.h"
#include "log_capture.h"
#include "model_outline.h"

#include <memory>
#include <string>
#include <utility>
#include <vector>

// Internal to libllama, but exported; declared here because llama-model.h drags in all of src/.
const std::vector<std::pair<std::string, ggml_tensor *>> & llama_internal_get_tensor_map(const llama_model * model);

class oa_model_skeleton {
  public:
    // Throws std::runtime_error with llama.cpp's own errors when the file cannot be loaded or the context not made.
    oa_model_skeleton(const std::string & path, llama_model_params model_params, llama_context_params context_params);

    llama_model *   model() const { return model_.get(); }
    llama_context * context() const { return context_.get(); }

    // From now on the context works as in llama-server while MTP heads guess (common/speculative.cpp): a model's own
    // hands out the hidden states of all tokens, that of its heads draws tokens on a device. It is not reserved anew.
    void let_heads_guess();

    // What llama.cpp logged as errors, one a line.
    std::string errors() const { return log_.errors(); }

  private:
    oa_log_capture                          log_; // first in, last out: freeing a model logs too
    std::shared_ptr<const oa_model_outline> outline_;
    std::vector<llama_sampler_ptr>          samplers_;
    llama_model_ptr                         model_;
    llama_context_ptr                       context_;
    bool                                    is_of_heads_ = false;
};
