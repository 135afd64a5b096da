#include "model_skeleton.h"

#include "llama-ext.h"

#include <stdexcept>

namespace {

constexpr int candidates = 10; // tokens that a head's guess is drawn from, in common/speculative.cpp

} // namespace

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
    is_of_heads_ = context_params.ctx_type == LLAMA_CONTEXT_TYPE_MTP;
}

void oa_model_skeleton::let_heads_guess() {
    llama_set_embeddings_nextn(context(), true, /*masked=*/is_of_heads_);
    if (!is_of_heads_) {
        llama_set_embeddings_layer_inp(context(), 0, false); // all that it does is to have graphs reserved again
        return;
    }
    for (uint32_t sequence = 0; sequence < llama_n_seq_max(context()); ++sequence) {
        samplers_.emplace_back(llama_sampler_chain_init(llama_sampler_chain_default_params()));
        llama_sampler_chain_add(samplers_.back().get(), llama_sampler_init_top_k(candidates));
        llama_set_sampler(context(), llama_seq_id(sequence), samplers_.back().get());
    }
}
