// The line between the hosts of a channel's two sides: a Unix socket at a path that only its owner may open. Over it go
// what a sender asks for between two iterations (sequences, their room) and the handles of shared memory. The end of
// the line is how each side notices that the other one's process is gone, before it touches its memory again.
#pragma once

#include "../protocol.h"
#include "shared_memory_cuda.h"

#include <string>

namespace oa::weave::cuda {

enum class Ask : uint32_t { look, attach, detach, open, reserve, trim };

struct Question {
    uint32_t     version; // protocol.h
    Ask          ask;
    uint64_t     epoch;  // attach: of the sender
    MemoryHandle outbox; // attach; with its file descriptor
    OpenTask     open;   // attach: the shape of all sequences, too
    ReserveTask  change; // reserve, trim
};

struct Answer {
    uint32_t     version;
    Status       status;
    Handle       handle;                     // open
    MemoryHandle inbox;                      // attach; with its file descriptor
    uint64_t     task_nbytes, result_nbytes; // of a slot, its header included
    uint64_t     free_nbytes;
    uint32_t     n_slots, draining;
    char         error[128]; // attach: why not, if not empty
};

// One end. Messages are whole or the line has ended.
class Line {
  public:
    // Throws ChannelError: none there, another user's.
    static Line connect(const std::string & path);

    explicit Line(int file) : file_(file) {}
    Line(Line && other) noexcept : file_(other.file_) { other.file_ = -1; }
    Line & operator=(Line && other) noexcept;
    ~Line();

    bool is_open() const { return file_ >= 0; }
    void close();

    // False: the line has ended, or no whole message came within `seconds` (of give: could go). `file` is passed along,
    // or is what came; -1: none.
    bool give(const void * message, size_t nbytes, int file, double seconds);
    bool take(void * message, size_t nbytes, int & file, double seconds);
    // Whether a process of the same user is at the other end.
    bool of_same_user() const;
    // Whether the other side has not gone; at once.
    bool lives() const;
    // Whether something has come within `seconds`.
    bool wait(double seconds) const;

  private:
    int file_ = -1;
};

// Where senders find a receiver.
class Listener {
  public:
    // Throws ChannelError: the path is in use by another receiver, or cannot be made.
    explicit Listener(const std::string & path);
    ~Listener();

    Listener(const Listener &)             = delete;
    Listener & operator=(const Listener &) = delete;

    // The next sender of this user; a line that is not open: none within `seconds`.
    Line accept(double seconds) const;

  private:
    const std::string path_;
    int               file_ = -1;
};

} // namespace oa::weave::cuda
