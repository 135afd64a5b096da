#include "model_skeleton.h"

#include <cstring>
#include <stdexcept>
#include <vector>

namespace {

// Reading 150 000 tokens and their merges takes three quarters of a load; no graph and no buffer depends on them.
std::vector<llama_model_kv_override> without_vocabulary(const llama_model_kv_override * given) {
    std::vector<llama_model_kv_override> overrides;
    for (; given && given->key[0] != 0; ++given) {
        overrides.push_back(*given);
    }
    llama_model_kv_override none{};
    none.tag = LLAMA_KV_OVERRIDE_TYPE_STR;
    std::strcpy(none.key, "tokenizer.ggml.model");
    std::strcpy(none.val_str, "no_vocab");
    overrides.push_back(none);
    overrides.push_back({}); // the end of the list
    return overrides;
}

} // namespace

oa_model_skeleton::oa_model_skeleton(const std::string & path, llama_model_params model_params,
                                     llama_context_params context_params) {
    model_params.no_alloc          = true;
    model_params.load_mode         = LLAMA_LOAD_MODE_NONE;
    model_params.progress_callback = nullptr;

    const auto overrides = without_vocabulary(model_params.kv_overrides);
    auto       quick     = model_params;
    quick.kv_overrides   = overrides.data();
    const auto load      = [&](const llama_model_params & params) {
        model_.reset(llama_model_load_from_file(path.c_str(), params));
    };
    load(quick);
    if (!model_) {
        log_.clear();
        load(model_params); // a file without <arch>.vocab_size needs its vocabulary to know the number of tokens
    }
    if (!model_) {
        throw std::runtime_error("cannot load " + path + "\n" + log_.errors());
    }
    context_.reset(llama_init_from_model(model_.get(), context_params));
    if (!context_) {
        throw std::runtime_error("cannot make a context for " + path + "\n" + log_.errors());
    }
}
