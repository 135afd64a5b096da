// Ledger of every backend buffer that is alive: bytes now and the highest so far, by buffer type.
// It counts what backends really allocated, which is what a plan's predicted bytes are checked against.
#pragma once

#include "ggml-backend.h"

#ifdef __cplusplus
#include <map>
#include <string>

struct oa_ledger_entry {
    size_t current = 0; // bytes
    size_t peak    = 0; // bytes, since the last reset
};

// A snapshot, keyed by the name of the buffer type ("CPU", "CUDA0", "RPC0[127.0.0.1:50052]").
GGML_API std::map<std::string, oa_ledger_entry> oa_buffer_ledger_get();
GGML_API void                                   oa_buffer_ledger_reset_peak();

extern "C" {
#endif

GGML_API void oa_buffer_ledger_add(ggml_backend_buffer_t buffer);
GGML_API void oa_buffer_ledger_remove(ggml_backend_buffer_t buffer);

#ifdef __cplusplus
}
#endif
