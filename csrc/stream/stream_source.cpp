#include "stream_source.h"

#include "tensor_flags.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <vector>

namespace {

struct state {
    dev_t    device;
    ino_t    inode;
    off_t    size;
    timespec changed;

    bool operator==(const state & other) const {
        return device == other.device && inode == other.inode && size == other.size &&
               changed.tv_sec == other.changed.tv_sec && changed.tv_nsec == other.changed.tv_nsec;
    }
};

struct source_file {
    int   fd;
    state as_opened;
};

// Files stay open until the process ends; a model that is loaded again uses the same entry.
std::mutex               g_mutex;
std::vector<source_file> g_files;

bool state_of(int fd, state & found) {
    struct stat s;
    if (fstat(fd, &s) != 0) {
        return false;
    }
    found = { s.st_dev, s.st_ino, s.st_size, s.st_mtim };
    return true;
}

source_file file_of(const ggml_tensor * weight) {
    const std::lock_guard<std::mutex> lock(g_mutex);
    return g_files.at(size_t(OA_STREAM_FILE(weight) - 1));
}

std::string path_of(int fd) {
    char          path[4096];
    const ssize_t n = readlink(("/proc/self/fd/" + std::to_string(fd)).c_str(), path, sizeof(path));
    return n > 0 ? std::string(path, size_t(n)) : "the model file";
}

} // namespace

void oa_stream_source_set(ggml_tensor * weight, int fd, size_t offset) {
    state found;
    if (!state_of(fd, found)) {
        throw std::runtime_error(std::string("the model file of a streamed weight cannot be read: ") + strerror(errno));
    }
    const std::lock_guard<std::mutex> lock(g_mutex);
    size_t                            at = 0;
    while (at < g_files.size() && !(g_files[at].as_opened == found)) {
        ++at;
    }
    if (at == g_files.size()) {
        // A description of its own: the loader's may be for direct I/O, which wants aligned reads.
        const int copy = open(("/proc/self/fd/" + std::to_string(fd)).c_str(), O_RDONLY | O_CLOEXEC);
        if (copy < 0) {
            throw std::runtime_error(std::string("the model file of a streamed weight cannot be kept open: ") +
                                     strerror(errno));
        }
        g_files.push_back({ copy, found });
    }
    const uint64_t offset64 = offset;
    OA_STREAM_FILE(weight)  = int32_t(at + 1);
    memcpy(OA_STREAM_OFFSET(weight), &offset64, sizeof(offset64));
}

std::string oa_stream_source_read(const ggml_tensor * weight, char * to, size_t from, size_t n) {
    const source_file file = file_of(weight);
    uint64_t          offset;
    memcpy(&offset, OA_STREAM_OFFSET(weight), sizeof(offset));
    size_t done = 0;
    while (done < n) {
        const ssize_t got = pread(file.fd, to + done, n - done, off_t(offset + from + done));
        if (got < 0 && errno == EINTR) {
            continue;
        }
        if (got < 0) {
            return path_of(file.fd) + " cannot be read while '" + weight->name + "' is streamed: " + strerror(errno);
        }
        if (got == 0) {
            return path_of(file.fd) + " became shorter while it was streamed: '" + weight->name + "' is cut off";
        }
        done += size_t(got);
    }
    state now;
    if (!state_of(file.fd, now) || !(now == file.as_opened)) {
        return path_of(file.fd) + " was changed while it was streamed; load the model again";
    }
    return "";
}
