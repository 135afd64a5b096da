#include "model_skeleton.h"

#include <stdexcept>

oa_model_skeleton::oa_model_skeleton(const std::string & path, llama_model_params model_params,
                                     llama_context_params context_params) :
    outline_(oa_model_outline::of(path)) {
    model_params.no_alloc          = true;
    model_params.load_mode         = LLAMA_LOAD_MODE_NONE;
    model_params.progress_callback = nullptr;

    model_.reset(llama_model_load_from_file(outline_->path().c_str(), model_params));
    if (!model_) {
        throw std::runtime_error("cannot load " + path + "\n" + log_.errors());
    }
    context_.reset(llama_init_from_model(model_.get(), context_params));
    if (!context_) {
        throw std::runtime_error("cannot make a context for " + path + "\n" + log_.errors());
    }
}
