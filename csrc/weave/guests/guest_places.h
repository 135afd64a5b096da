// What patch 0011 asks in llama-server: where a slot's sequence is, and whether another one may be a guest.
#pragma once

#include "llama.h"

// Whether a receiver has the sequence. Without channels none has.
LLAMA_API bool oa_weave_is_guest(llama_context * ctx, llama_seq_id seq_id);

// Whether a receiver has room for so many tokens more; attaches to one where that is due.
LLAMA_API bool oa_weave_has_room(llama_context * ctx, uint32_t n_tokens);
