#include "rpc_worker.h"

#include "rpc_hooks.h"
#include "rpc_socket.h"

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <stdexcept>
#include <string>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>
#ifdef __linux__
#include <sys/prctl.h>
#endif

namespace oa_rpc {

namespace {

int  g_control = -1; // in the worker
bool g_used    = false;

constexpr char READY = 'R';

// One byte and a descriptor, as unix sockets pass them.
struct passed {
    char   byte                                         = 0;
    iovec  part                                         = { &byte, 1 };
    msghdr head                                         = {};
    alignas(cmsghdr) char room[CMSG_SPACE(sizeof(int))] = {};

    passed() {
        head.msg_iov        = &part;
        head.msg_iovlen     = 1;
        head.msg_control    = room;
        head.msg_controllen = sizeof(room);
    }
};

bool send_descriptor(int control, int fd) {
    passed    message;
    cmsghdr * entry   = CMSG_FIRSTHDR(&message.head);
    entry->cmsg_level = SOL_SOCKET;
    entry->cmsg_type  = SCM_RIGHTS;
    entry->cmsg_len   = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(entry), &fd, sizeof(fd));
    return sendmsg(control, &message.head, MSG_NOSIGNAL) == 1;
}

int receive_descriptor(int control) {
    passed message;
    int    fd = -1;
    while (recvmsg(control, &message.head, MSG_CMSG_CLOEXEC) < 0) {
        if (errno != EINTR) {
            return -1;
        }
    }
    if (const cmsghdr * entry = CMSG_FIRSTHDR(&message.head)) {
        std::memcpy(&fd, CMSG_DATA(entry), sizeof(fd));
    }
    return fd;
}

// In the new process.
void become(int control, bool first, int supervisor) {
    g_control = control;
#ifdef __linux__
    prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
#endif
    if (getppid() != supervisor) {
        _exit(0);
    }
    setenv("GGML_NO_BACKTRACE", "1", 0); // what a client did wrong is in the line before; it is no fault of ours
    if (!first) {
        const int nowhere = open("/dev/null", O_WRONLY); // the devices are told once
        dup2(nowhere, STDOUT_FILENO);
        close(nowhere);
    }
}

} // namespace

void worker_is_used() {
    g_used = true;
}

worker::~worker() {
    if (control_ >= 0) {
        close(control_);
    }
}

bool worker::start() {
    int pair[2];
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) != 0) {
        throw std::runtime_error(std::string("no socket for the worker: ") + std::strerror(errno));
    }
    std::fflush(nullptr);
    const int supervisor = getpid();
    process_             = fork();
    if (process_ == 0) {
        close(pair[0]);
        become(pair[1], first_, supervisor);
        return true;
    }
    close(pair[1]);
    if (process_ < 0) {
        close(pair[0]);
        throw std::runtime_error(std::string("no process for the worker: ") + std::strerror(errno));
    }
    control_   = pair[0];
    state_     = state::starting;
    was_ready_ = false;
    first_     = false;
    return false;
}

void worker::read_control() {
    char          said = 0;
    const ssize_t n    = recv(control_, &said, 1, MSG_DONTWAIT);
    if (n == 1 && said == READY) {
        state_     = state::ready;
        was_ready_ = true;
    } else if (n >= 0 || (errno != EAGAIN && errno != EINTR)) {
        end();
    }
}

void worker::end() {
    close(control_);
    control_ = -1;
    kill(process_, SIGKILL); // it may have closed the control socket without ending
    while (waitpid(process_, &exit_status_, 0) < 0 && errno == EINTR) {
    }
    state_ = state::none;
}

bool worker::hand_over(int client) {
    fcntl(client, F_SETFL, fcntl(client, F_GETFL) & ~O_NONBLOCK);
    const bool sent = send_descriptor(control_, client);
    close(client);
    if (sent) {
        state_ = state::serving;
    }
    return sent;
}

} // namespace oa_rpc

using namespace oa_rpc;

int oa_rpc_worker_socket() {
    return g_control;
}

void oa_rpc_accepted(int * fd) {
    if (g_control < 0) {
        set_up(*fd);
        return;
    }
    std::fflush(nullptr);
    if (g_used || send(g_control, &READY, 1, MSG_NOSIGNAL) != 1) {
        _exit(0);
    }
    *fd = receive_descriptor(g_control);
    if (*fd < 0) {
        _exit(0); // the supervisor is gone
    }
}
