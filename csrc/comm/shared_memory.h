// Memory that the ranks of one host share. It has no name in any file system (memfd), so nothing is left behind however
// the ranks end: the kernel frees it with the last mapping.
#pragma once

#include <cstddef>
#include <cstdint>

class oa_shm_segment {
  public:
    oa_shm_segment() = default;
    ~oa_shm_segment();

    oa_shm_segment(const oa_shm_segment &)             = delete;
    oa_shm_segment & operator=(const oa_shm_segment &) = delete;

    // Zeroed memory that others attach to by this process and descriptor(), until close_descriptor().
    // `token` lets them see that they have found the right one.
    void create(size_t size, uint64_t token);
    void attach(int pid, int descriptor, size_t size, uint64_t token);
    void close_descriptor();

    int    descriptor() const { return descriptor_; }
    char * data() const { return static_cast<char *>(data_) + lead; } // on a page boundary

  private:
    static constexpr size_t lead = 4096; // the token's page

    void map(size_t size);

    int    descriptor_ = -1;
    void * data_       = nullptr;
    size_t size_       = 0;
};
