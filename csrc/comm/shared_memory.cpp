#include "shared_memory.h"

#include "comm_error.h"

#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <string>
#include <sys/mman.h>
#include <unistd.h>

namespace {

[[noreturn]] void fail(const std::string & what) {
    throw oa_comm_error(what + ": " + std::strerror(errno));
}

} // namespace

oa_shared_memory::~oa_shared_memory() {
    close_descriptor();
    if (data_) {
        munmap(data_, size_);
    }
}

void oa_shared_memory::close_descriptor() {
    if (descriptor_ >= 0) {
        close(descriptor_);
        descriptor_ = -1;
    }
}

void oa_shared_memory::map(size_t size) {
    size_       = size + lead;
    void * data = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor_, 0);
    if (data == MAP_FAILED) {
        fail("cannot map " + std::to_string(size_) + " bytes of shared memory");
    }
    data_ = data;
}

void oa_shared_memory::create(size_t size, uint64_t token) {
    descriptor_ = memfd_create("oallama-allreduce", MFD_CLOEXEC);
    if (descriptor_ < 0 || ftruncate(descriptor_, off_t(size + lead)) != 0) {
        fail("cannot make " + std::to_string(size + lead) + " bytes of shared memory");
    }
    map(size);
    std::memcpy(data_, &token, sizeof(token));
}

void oa_shared_memory::attach(int pid, int descriptor, size_t size, uint64_t token) {
    const std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(descriptor);
    descriptor_            = open(path.c_str(), O_RDWR | O_CLOEXEC);
    const std::string hint = " (ranks with the same host id must run on one machine and see each other's processes;"
                             " give other machines other host ids)";
    if (descriptor_ < 0) {
        fail("cannot open the shared memory of this host, " + path + hint);
    }
    if (lseek(descriptor_, 0, SEEK_END) != off_t(size + lead)) {
        throw oa_comm_error(path + " is not the shared memory of this host" + hint);
    }
    map(size);
    uint64_t found;
    std::memcpy(&found, data_, sizeof(found));
    if (found != token) {
        throw oa_comm_error(path + " is not the shared memory of this host" + hint);
    }
}
