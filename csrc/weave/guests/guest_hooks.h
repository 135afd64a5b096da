// What patch 0017 calls in libllama. Without channels nothing is woven: a cache is llama.cpp's own.
#pragma once

#include "guest_cache.h"
#include "llama-batch.h"
#include "llama-context.h"
#include "llama-graph.h"

// The options of the next context's cache in place of the environment's: OALLAMA_WEAVE_CHANNELS (paths, by commas),
// OALLAMA_WEAVE_FIRST_GUEST (a number of a sequence), OALLAMA_WEAVE_DEADLINE_MS. None: no channels.
LLAMA_API void oa_weave_set_guests(const oa::weave::GuestOptions & options);
// Of a context; zero where nothing is woven.
LLAMA_API oa::weave::GuestStats oa_weave_guest_stats(llama_context * ctx);

// In place of `new llama_kv_cache`. Throws std::runtime_error where channels are wanted that this context cannot have.
llama_kv_cache * oa_weave_new_cache(const llama_model & model, const llama_hparams & hparams, ggml_type type_k,
                                    ggml_type type_v, bool v_trans, bool offload, bool unified, uint32_t kv_size,
                                    uint32_t n_seq_max, uint32_t n_pad, uint32_t n_swa, llama_swa_type swa_type,
                                    llama_memory_t mem_other, const llama_kv_cache::layer_filter_cb & filter,
                                    const llama_kv_cache::layer_reuse_cb & reuse,
                                    const llama_kv_cache::layer_share_cb & share);

// Inputs of a graph whose last rows are guests'; null: it has no such rows and is built as ever.
std::unique_ptr<llm_graph_input_attn_kv> oa_weave_input(const llm_graph_context & graph);

// Attention of all rows of a layer, some of them by receivers; null: there are none.
ggml_tensor * oa_weave_attend(const llm_graph_context & graph, const llm_graph_input_attn_kv * inp, ggml_tensor * q,
                              ggml_tensor * k, ggml_tensor * v, ggml_tensor * sinks, float scale, int il);

// Decodes in place of `ctx`, and again when guests were lost meanwhile; false: nothing is woven.
bool oa_weave_decode(llama_context * ctx, const llama_batch_ext & batch, int & result);
