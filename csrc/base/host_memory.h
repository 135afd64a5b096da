// How much memory this process may still take: what the system has and what its control groups allow.
#pragma once

#include "ggml-backend.h"

#include <cstddef>

// Bytes; SIZE_MAX where nothing says. Page cache counts as free: the kernel gives it back. OALLAMA_HOST_MEMORY (bytes)
// overrides it.
GGML_API size_t oa_host_memory();
