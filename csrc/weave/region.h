// The file in shared memory behind a channel: mapped by the receiver, who makes it, and by one sender.
//
// Only its owner may open it. Each side holds a lock as long as its process lives, by which the other one knows: the
// kernel frees it however a process ends.
#pragma once

#include "protocol.h"

#include <atomic>
#include <stdexcept>
#include <string>

namespace oa::weave {

class ChannelError : public std::runtime_error {
  public:
    using std::runtime_error::runtime_error;
};

enum class Side { receiver, sender };

class Region {
  public:
    // A new region at `path`, in place of one whose receiver is gone. Throws ChannelError.
    static Region create(const std::string & path, uint32_t n_slots, size_t task_nbytes, size_t result_nbytes);
    // One that a receiver has made. Throws ChannelError: none, another user's, another version, a second sender.
    static Region attach(const std::string & path);

    Region(Region && other) noexcept;
    Region & operator=(Region &&) = delete;
    ~Region();

    const Header & header() const { return header_; } // as it was in the beginning

    template <class T> T load_acquire(size_t word) const {
        return __atomic_load_n(reinterpret_cast<const T *>(data_ + word), __ATOMIC_ACQUIRE);
    }

    template <class T> void store_release(size_t word, T value) {
        __atomic_store_n(reinterpret_cast<T *>(data_ + word), value, __ATOMIC_RELEASE);
    }

    TaskHeader *   task(uint32_t slot) const;
    ResultHeader * result(uint32_t slot) const;

    // Whether the process on the other side lives (it may be stopped).
    bool other_lives() const;
    // Sleep while a word of 32 bits is `seen`, for at most `seconds`; may wake early.
    void wait(size_t word, uint32_t seen, double seconds) const;
    void wake(size_t word) const;

  private:
    Region(Side side, int file, std::string path) : side_(side), file_(file), path_(std::move(path)) {}

    // Removes the file of a receiver that is gone, if there is one. Throws ChannelError: it lives.
    static void clear_path(const std::string & path);
    void        map(size_t nbytes);
    bool        lock(Side side) const;

    Side        side_;
    int         file_;
    std::string path_;
    char *      data_   = nullptr;
    size_t      nbytes_ = 0;
    Header      header_ = {};
};

// The payload behind a header.
inline char * payload(TaskHeader * header) {
    return reinterpret_cast<char *>(header) + line;
}

inline char * payload(ResultHeader * header) {
    return reinterpret_cast<char *>(header) + line;
}

} // namespace oa::weave
