// What our kernels read and write, told to ThreadSanitizer: it does not see accesses of 64 bytes.
#pragma once

#include <cstddef>

#if defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define OA_TELLS_THREAD_SANITIZER
extern "C" void __tsan_read_range(void * from, unsigned long n_bytes);
extern "C" void __tsan_write_range(void * from, unsigned long n_bytes);
#endif
#endif

namespace oa::decode {

inline void tell_read([[maybe_unused]] const void * from, [[maybe_unused]] size_t n_bytes) {
#ifdef OA_TELLS_THREAD_SANITIZER
    __tsan_read_range(const_cast<void *>(from), n_bytes);
#endif
}

inline void tell_written([[maybe_unused]] void * from, [[maybe_unused]] size_t n_bytes) {
#ifdef OA_TELLS_THREAD_SANITIZER
    __tsan_write_range(from, n_bytes);
#endif
}

} // namespace oa::decode
