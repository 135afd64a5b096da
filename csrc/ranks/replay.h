// Ranks that do what rank 0 does: whatever program rank 0 runs (llama-server, llama-cpp-python), its calls that load a
// model, make a context, decode or change the KV cache are broadcast, and the other ranks repeat them (oa_replay_run).
// Hooks: patch 0008. Without ranks (ranks.h) every hook returns at once.
#pragma once

#include "llama.h"
#include "ranks.h"

#include <string>

// Calls of llama.h that change a context and take numbers only.
enum oa_replay_call {
    OA_REPLAY_LOAD,
    OA_REPLAY_INIT,
    OA_REPLAY_FREE,
    OA_REPLAY_FREE_MODEL,
    OA_REPLAY_PROCESS,
    OA_REPLAY_CLEAR,
    OA_REPLAY_SEQ_RM,
    OA_REPLAY_SEQ_CP,
    OA_REPLAY_SEQ_KEEP,
    OA_REPLAY_SEQ_ADD,
    OA_REPLAY_SEQ_DIV,
    OA_REPLAY_SET_EMBEDDINGS,
    OA_REPLAY_SET_CAUSAL,
    OA_REPLAY_SET_WARMUP,
};

// ---- rank 0, called where llama.h's functions begin
// --------------------------------------------------------------------

// Whether the model will be (is) split over ranks, so that the call below replaces the caller's body.
bool oa_replay_wanted(const llama_model_params & params);
bool oa_replay_wanted(const llama_model * model);

llama_model *   oa_replay_load(const char * path, llama_model_params params);
llama_context * oa_replay_init(llama_model * model, llama_context_params params);

void oa_replay_free(const llama_context * context);
void oa_replay_free(const llama_model * model);
void oa_replay_process(const llama_context * context, llama_process_type type, const llama_batch_ext & batch);
void oa_replay_tell(oa_replay_call call, const llama_context * context, int a);
void oa_replay_tell(oa_replay_call call, llama_memory_t memory, int a = 0, int b = 0, int c = 0, int d = 0);

// Whether `what` cannot be had because the model is spread over ranks; says so in the log.
bool oa_replay_refuses(const llama_model * model, const char * what);
bool oa_replay_refuses(const llama_context * context, const char * what);

// ---- the other ranks -----------------------------------------------------------------------------------------------

// Repeats rank 0's calls until rank 0's program ends. `path`, if not empty, is this host's copy of the model,
// `n_threads` its threads (0: rank 0's). Returns why it stopped early, empty after a regular end.
LLAMA_API std::string oa_replay_run(const std::string & path, int n_threads);
