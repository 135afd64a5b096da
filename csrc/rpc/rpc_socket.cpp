#include "rpc_socket.h"

#include <algorithm>
#include <arpa/inet.h>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdexcept>
#include <sys/socket.h>
#include <unistd.h>

namespace oa_rpc {

namespace {

void set_option(int fd, int level, int name, int value) {
    setsockopt(fd, level, name, &value, sizeof(value));
}

int milliseconds_until(double deadline) {
    return int(std::clamp((deadline - now_s()) * 1e3 + 1, 0.0, 1e8));
}

} // namespace

double now_s() {
    using namespace std::chrono;
    return duration<double>(steady_clock::now().time_since_epoch()).count();
}

bool is_loopback(const std::string & host) {
    in_addr  v4;
    in6_addr v6;
    if (inet_pton(AF_INET, host.c_str(), &v4) == 1) {
        return (ntohl(v4.s_addr) >> 24) == 127;
    }
    return host == "localhost" || (inet_pton(AF_INET6, host.c_str(), &v6) == 1 && IN6_IS_ADDR_LOOPBACK(&v6));
}

namespace {

// BBR sends at the rate that the connection has been seen to use. Between small messages that is little, and the next
// one is stretched: 12.8 kB took 7 ms of 100 Mbit/s, not 1.
void send_at_once(int fd) {
#ifdef __linux__
    char      name[16] = {};
    socklen_t size     = sizeof(name);
    if (getsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name, &size) != 0 || std::strcmp(name, "bbr") != 0) {
        return;
    }
    for (const char * other : { "cubic", "reno" }) {
        if (setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, other, socklen_t(std::strlen(other))) == 0) {
            return;
        }
    }
#endif
}

void watch_peer(int fd) {
    const char * variable = std::getenv("OALLAMA_RPC_TIMEOUT");
    const double seconds  = variable ? std::atof(variable) : 0;
    if (!(seconds > 0)) {
        return;
    }
    const int whole = int(std::clamp(seconds, 1.0, 86400.0));
    const int idle  = std::max(1, whole / 4);
    set_option(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
#ifdef __linux__
    set_option(fd, IPPROTO_TCP, TCP_KEEPIDLE, idle);
    set_option(fd, IPPROTO_TCP, TCP_KEEPINTVL, idle);
    set_option(fd, IPPROTO_TCP, TCP_KEEPCNT, std::max(1, whole / idle - 1));
    set_option(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, whole * 1000);
#endif
}

} // namespace

void set_up(int fd) {
    send_at_once(fd);
    watch_peer(fd);
}

int connect_to(const std::string & host, int port, double timeout_s) {
    addrinfo   hints  = {};
    addrinfo * found  = nullptr;
    hints.ai_family   = AF_INET; // as upstream's client
    hints.ai_socktype = SOCK_STREAM;
    if (const int error = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found)) {
        throw std::runtime_error(gai_strerror(error));
    }
    const int fd    = socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    int       error = fd < 0 ? errno : 0;
    if (!error && connect(fd, found->ai_addr, found->ai_addrlen) != 0) {
        error = errno;
    }
    freeaddrinfo(found);
    if (error == EINPROGRESS) {
        pollfd    waiting = { fd, POLLOUT, 0 };
        socklen_t size    = sizeof(error);
        if (poll(&waiting, 1, milliseconds_until(now_s() + timeout_s)) <= 0) {
            error = ETIMEDOUT;
        } else {
            getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size);
        }
    }
    if (error) {
        if (fd >= 0) {
            close(fd);
        }
        throw std::runtime_error(std::strerror(error));
    }
    fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) & ~O_NONBLOCK);
    set_option(fd, IPPROTO_TCP, TCP_NODELAY, 1);
    return fd;
}

void socket_wire::wait(short events) const {
    pollfd waiting = { fd_, events, 0 };
    while (true) {
        const int n = poll(&waiting, 1, milliseconds_until(deadline));
        if (n > 0) {
            return;
        }
        if (n == 0) {
            throw std::runtime_error("no answer in time");
        }
        if (errno != EINTR) {
            throw std::runtime_error(std::strerror(errno));
        }
    }
}

void socket_wire::read(void * data, size_t size) {
    for (size_t have = 0; have < size;) {
        wait(POLLIN);
        const ssize_t n = recv(fd_, static_cast<char *>(data) + have, size - have, MSG_DONTWAIT);
        if (n == 0 || (n < 0 && errno == ECONNRESET)) {
            throw closed("the connection was closed");
        }
        if (n < 0 && errno != EAGAIN && errno != EINTR) {
            throw std::runtime_error(std::strerror(errno));
        }
        have += n > 0 ? size_t(n) : 0;
    }
}

void socket_wire::write(const void * data, size_t size) {
    for (size_t sent = 0; sent < size;) {
        wait(POLLOUT);
        const ssize_t n = send(fd_, static_cast<const char *>(data) + sent, size - sent, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (n < 0 && errno != EAGAIN && errno != EINTR) {
            throw std::runtime_error(std::strerror(errno));
        }
        sent += n > 0 ? size_t(n) : 0;
    }
}

} // namespace oa_rpc
