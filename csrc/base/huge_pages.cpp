#include "huge_pages.h"

#include <cstdint>
#include <cstdlib>
#include <cstring>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace {

constexpr size_t smallest = size_t(4) << 20; // the kernel's huge pages have 2 MiB on most processors

#ifdef __linux__
// The pages that lie in the block as a whole.
void advise(void * memory, size_t size, int advice) {
    constexpr uintptr_t page  = 4096;
    const uintptr_t     first = (uintptr_t(memory) + page - 1) / page * page,
                    end       = (uintptr_t(memory) + size) / page * page;
    if (size >= smallest) {
        madvise(reinterpret_cast<void *>(first), end - first, advice); // a kernel without them refuses: no harm
    }
}
#endif

} // namespace

void oa_huge_pages(void * memory, size_t size) {
#ifdef MADV_HUGEPAGE
    static const char * wanted = getenv("OALLAMA_HUGE_PAGES");
    if (!wanted || strcmp(wanted, "0") != 0) {
        advise(memory, size, MADV_HUGEPAGE);
    }
#endif
    (void) memory, (void) size;
}

void oa_small_pages(void * memory, size_t size) {
#ifdef MADV_NOHUGEPAGE
    advise(memory, size, MADV_NOHUGEPAGE);
#endif
    (void) memory, (void) size;
}
