// What several readers of GGUF files ask for.
#pragma once

#include "ggml-cpp.h"

#include <string>

// Text behind a key; empty without it.
inline std::string oa_gguf_text(const gguf_context * gguf, const char * key) {
    const int64_t id = gguf_find_key(gguf, key);
    return id >= 0 && gguf_get_kv_type(gguf, id) == GGUF_TYPE_STRING ? gguf_get_val_str(gguf, id) : "";
}

// Files that the model is split into; 1 where it is not.
inline int oa_gguf_parts(const gguf_context * gguf) {
    const int64_t id = gguf_find_key(gguf, "split.count");
    return id >= 0 && gguf_get_kv_type(gguf, id) == GGUF_TYPE_UINT16 ? gguf_get_val_u16(gguf, id) : 1;
}
