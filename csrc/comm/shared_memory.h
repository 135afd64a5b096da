// Memory that the ranks of one host share. It has no name in any file system (memfd), so nothing is left behind however
// the ranks end: the kernel frees it with the last mapping.
#pragma once

#include <cstddef>
#include <cstdint>

class oa_shared_memory {
  public:
    oa_shared_memory() = default;
    ~oa_shared_memory();

    oa_shared_memory(const oa_shared_memory &)             = delete;
    oa_shared_memory & operator=(const oa_shared_memory &) = delete;

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
