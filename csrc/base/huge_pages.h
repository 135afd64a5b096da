// Huge pages for large blocks of memory that is read from one end to the other, as weights and caches are: a processor
// looks up fewer addresses. Linux gives them where its transparent huge pages are set to "madvise" or "always".
#pragma once

#include "ggml.h"

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

// Asks for huge pages for a new block, if it is large. OALLAMA_HUGE_PAGES=0 asks for none.
GGML_API void oa_huge_pages(void * memory, size_t size);
// Asks for none for a new block that stands for a mapped file, which has none.
GGML_API void oa_small_pages(void * memory, size_t size);

#ifdef __cplusplus
}
#endif
