#include "control.h"

#include "../region.h"
#include "clock.h"

#include <cerrno>
#include <cstring>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

namespace oa::weave::cuda {

namespace {

std::string reason() {
    return strerror(errno);
}

sockaddr_un address_of(const std::string & path) {
    sockaddr_un address = {};
    address.sun_family  = AF_UNIX;
    if (path.size() >= sizeof(address.sun_path)) {
        throw ChannelError("the path of a channel has at most " + std::to_string(sizeof(address.sun_path) - 1) +
                           " characters: " + path);
    }
    memcpy(address.sun_path, path.c_str(), path.size());
    return address;
}

bool ready(int file, short what, double seconds) {
    pollfd wanted = { file, what, 0 };
    return file >= 0 && ::poll(&wanted, 1, int(seconds * 1e3) + (seconds > 0.0)) == 1 && (wanted.revents & what) != 0;
}

// A message of ours with room for one file descriptor.
struct Parcel {
    Parcel(void * data, size_t nbytes) : part{ data, nbytes } {
        header.msg_iov    = &part;
        header.msg_iovlen = 1;
    }

    void make_room() {
        header.msg_control    = space;
        header.msg_controllen = sizeof(space);
    }

    iovec  part;
    msghdr header                                        = {};
    alignas(cmsghdr) char space[CMSG_SPACE(sizeof(int))] = {};
};

} // namespace

Line Line::connect(const std::string & path) {
    const sockaddr_un address = address_of(path);
    Line              line(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    if (line.file_ < 0 || ::connect(line.file_, reinterpret_cast<const sockaddr *>(&address), sizeof(address)) != 0) {
        const bool nobody = errno == ENOENT || errno == ECONNREFUSED;
        throw ChannelError(nobody ? "no receiver at " + path : "cannot reach " + path + ": " + reason());
    }
    if (!line.of_same_user()) {
        throw ChannelError(path + " belongs to another user");
    }
    return line;
}

Line & Line::operator=(Line && other) noexcept {
    std::swap(file_, other.file_);
    return *this;
}

Line::~Line() {
    close();
}

void Line::close() {
    if (file_ >= 0) {
        ::close(file_);
    }
    file_ = -1;
}

bool Line::give(const void * message, size_t nbytes, int file, double seconds) {
    Parcel parcel(const_cast<void *>(message), nbytes);
    if (file >= 0) {
        parcel.make_room();
        cmsghdr * about   = CMSG_FIRSTHDR(&parcel.header);
        about->cmsg_level = SOL_SOCKET;
        about->cmsg_type  = SCM_RIGHTS;
        about->cmsg_len   = CMSG_LEN(sizeof(int));
        memcpy(CMSG_DATA(about), &file, sizeof(int));
    }
    return ready(file_, POLLOUT, seconds) && sendmsg(file_, &parcel.header, MSG_NOSIGNAL) == ssize_t(nbytes);
}

bool Line::take(void * message, size_t nbytes, int & file, double seconds) {
    Parcel parcel(message, nbytes);
    parcel.make_room();
    file = -1;
    if (!ready(file_, POLLIN, seconds)) {
        return false;
    }
    const ssize_t n = recvmsg(file_, &parcel.header, MSG_CMSG_CLOEXEC);
    for (cmsghdr * about = CMSG_FIRSTHDR(&parcel.header); n >= 0 && about; about = CMSG_NXTHDR(&parcel.header, about)) {
        if (about->cmsg_level == SOL_SOCKET && about->cmsg_type == SCM_RIGHTS) {
            memcpy(&file, CMSG_DATA(about), sizeof(int));
        }
    }
    if (n == ssize_t(nbytes) && (parcel.header.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) == 0) {
        return true;
    }
    if (file >= 0) {
        ::close(file);
        file = -1;
    }
    return false;
}

bool Line::of_same_user() const {
    ucred     other = {};
    socklen_t size  = sizeof(other);
    return getsockopt(file_, SOL_SOCKET, SO_PEERCRED, &other, &size) == 0 && other.uid == geteuid();
}

bool Line::lives() const {
    pollfd wanted = { file_, POLLRDHUP, 0 };
    return file_ >= 0 && ::poll(&wanted, 1, 0) == 0;
}

bool Line::wait(double seconds) const {
    return ready(file_, POLLIN, seconds);
}

Listener::Listener(const std::string & path) : path_(path) {
    const sockaddr_un address = address_of(path);
    try {
        Line::connect(path);
        throw ChannelError(path + " is in use by another receiver");
    } catch (const ChannelError & e) {
        struct stat about;
        if (strncmp(e.what(), "no receiver", 11) != 0) {
            throw;
        }
        if (lstat(path.c_str(), &about) == 0 && S_ISSOCK(about.st_mode) && about.st_uid == geteuid()) {
            unlink(path.c_str()); // of a receiver that is gone
        }
    }
    file_               = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    const mode_t before = umask(0177); // of the process, for a moment
    const bool   made   = file_ >= 0 && bind(file_, reinterpret_cast<const sockaddr *>(&address), sizeof(address)) == 0;
    umask(before);
    if (!made || listen(file_, 4) != 0) {
        const std::string why = reason();
        if (file_ >= 0) {
            ::close(file_);
        }
        throw ChannelError("cannot make " + path + ": " + why);
    }
}

Listener::~Listener() {
    unlink(path_.c_str());
    ::close(file_);
}

Line Listener::accept(double seconds) const {
    if (!ready(file_, POLLIN, seconds)) {
        return Line(-1);
    }
    Line line(accept4(file_, nullptr, nullptr, SOCK_CLOEXEC));
    if (line.is_open() && !line.of_same_user()) {
        line.close();
    }
    return line;
}

} // namespace oa::weave::cuda
