#include "rpc_door.h"

#include "rpc_socket.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <sys/socket.h>
#include <unistd.h>

namespace oa_rpc {

namespace {

constexpr double NEVER_S          = 86400;
constexpr int    BEGIN_OF_COMMAND = 9;  // a byte and the length of what follows
constexpr int    LONGEST_HELLO    = 64; // of our version 24

// Reads away what comes; true at the end of the connection.
bool drained(int fd) {
    char          rest[4096];
    const ssize_t n = recv(fd, rest, sizeof(rest), MSG_DONTWAIT);
    return n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR);
}

// poll() calls the socket readable from so many bytes on, or at its end.
void ready_from(int fd, int n_bytes) {
    setsockopt(fd, SOL_SOCKET, SO_RCVLOWAT, &n_bytes, sizeof(n_bytes));
}

} // namespace

door::~door() {
    close_all();
    if (!key_.empty()) {
        explicit_bzero(key_.data(), key_.size());
    }
}

void door::close_all() {
    for (const guest & one : guests_) {
        close(one.fd);
    }
    guests_.clear();
}

size_t door::waiting() const {
    return std::count_if(guests_.begin(), guests_.end(), [](const guest & g) { return g.at == stage::waiting; });
}

// Those who have not answered yet go first; those who answered wrongly keep their places, or waiting would be no limit.
bool door::make_room(const std::string & address) {
    const auto outside = [&](const guest & g) {
        return g.address == address && (g.at == stage::asked || g.at == stage::held);
    };
    const bool of_one = size_t(std::count_if(guests_.begin(), guests_.end(), outside)) >= MOST_OF_ONE;
    if (!of_one && guests_.size() < MOST) {
        return true;
    }
    const auto oldest = std::find_if(guests_.begin(), guests_.end(), [&](const guest & g) {
        return g.at == stage::leaving || (g.at == stage::asked && (!of_one || g.address == address));
    });
    if (oldest == guests_.end()) {
        return false;
    }
    close(oldest->fd);
    guests_.erase(oldest);
    return true;
}

void door::enter(int fd, const std::string & address) {
    if (!make_room(address)) {
        close(fd);
        return;
    }
    const double now = now_s();
    guests_.push_back({ fd, address, stage::asked, now + HANDSHAKE_TIMEOUT_S, {}, {}, 0, false });
    guest & one = guests_.back();
    if (key_.empty()) {
        ready_from(fd, BEGIN_OF_COMMAND);
        read_hello(one, now);
        return;
    }
    one.question = make_challenge();
    if (send(fd, &one.question, sizeof(one.question), MSG_DONTWAIT | MSG_NOSIGNAL) != sizeof(one.question)) {
        leave(one, now);
    }
}

void door::add_to(std::vector<pollfd> & polled) const {
    for (const guest & one : guests_) {
        const bool reads = one.at == stage::asked || one.at == stage::leaving;
        polled.push_back({ one.at == stage::held ? -1 : one.fd, short(reads ? POLLIN | POLLRDHUP : POLLRDHUP), 0 });
    }
}

double door::next_due() const {
    double due = now_s() + NEVER_S;
    for (const guest & one : guests_) {
        due = std::min(due, one.due);
    }
    return due;
}

void door::say(guest & one, status is) {
    if (!key_.empty()) {
        const verdict said = make_verdict(key_, one.question, one.reply, is);
        send(one.fd, &said, sizeof(said), MSG_DONTWAIT | MSG_NOSIGNAL);
    }
}

void door::leave(guest & one, double now) {
    shutdown(one.fd, SHUT_WR);
    one.at  = stage::leaving;
    one.due = now + GOODBYE_S;
}

void door::refuse(guest & one, double now, const char * why) {
    const double wait = failures_.add(one.address, now);
    std::printf("refused %s: %s (answered in %.2f s)\n", one.address.c_str(), why, wait);
    std::fflush(stdout);
    one.at  = stage::held;
    one.due = now + wait;
}

void door::read_answer(guest & one, double now) {
    char *        at = reinterpret_cast<char *>(&one.reply);
    const ssize_t n  = recv(one.fd, at + one.have, sizeof(one.reply) - one.have, MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) {
        return;
    }
    if (n <= 0) {
        leave(one, now);
        return;
    }
    one.have += size_t(n);
    if (std::memcmp(at, MAGIC, std::min(one.have, MAGIC_BYTES)) != 0) {
        refuse(one, now, "it shows no token");
    } else if (one.have == sizeof(one.reply)) {
        judge(one, now);
    }
}

// Without a token: a client says hello first, whole. It stays in the socket for the worker.
void door::read_hello(guest & one, double now) {
    char          said[BEGIN_OF_COMMAND + LONGEST_HELLO];
    const ssize_t n = recv(one.fd, said, sizeof(said), MSG_DONTWAIT | MSG_PEEK);
    if (n < BEGIN_OF_COMMAND) {
        if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR)) {
            leave(one, now);
        }
        return;
    }
    uint64_t length = 0;
    std::memcpy(&length, said + 1, sizeof(length));
    if (uint8_t(said[0]) != CMD_HELLO || length > LONGEST_HELLO || waiting() >= MOST_WAITING) {
        leave(one, now);
    } else if (n < BEGIN_OF_COMMAND + ssize_t(length)) {
        ready_from(one.fd, BEGIN_OF_COMMAND + int(length));
    } else {
        ready_from(one.fd, 1);
        one.at  = stage::waiting;
        one.due = now + NEVER_S;
    }
}

void door::judge(guest & one, double now) {
    if (!is_right(key_, one.question, one.reply)) {
        refuse(one, now, "wrong token");
    } else if (waiting() >= MOST_WAITING) {
        say(one, status::busy);
        leave(one, now);
    } else {
        one.at  = stage::waiting;
        one.due = now + GRACE_S;
    }
}

void door::overdue(guest & one, double now, bool serving) {
    if (one.at == stage::asked) {
        leave(one, now); // no attempt: there is nothing to hold back
    } else if (one.at == stage::held) {
        say(one, status::refused);
        leave(one, now);
    } else if (one.at == stage::waiting && !serving) {
        one.due = now + GRACE_S; // a worker starts: not long
    } else if (one.at == stage::waiting && one.reply.wanted == wish::know_if_busy) {
        say(one, status::busy);
        leave(one, now);
    } else if (one.at == stage::waiting) {
        say(one, status::queued);
        one.due = now + NEVER_S;
    }
}

void door::step(const std::vector<pollfd> & polled, bool serving) {
    const double now = now_s();
    for (auto it = guests_.begin(); it != guests_.end();) {
        guest &    one   = *it;
        const auto found = std::find_if(polled.begin(), polled.end(), [&](const pollfd & p) { return p.fd == one.fd; });
        const bool ready = found != polled.end() && found->revents != 0;
        bool       gone  = one.at == stage::leaving && (now >= one.due || (ready && drained(one.fd)));
        gone |= one.at == stage::waiting && ready; // it hung up
        gone |= one.at == stage::asked && key_.empty() && ready && (found->revents & (POLLRDHUP | POLLHUP | POLLERR));
        if (!gone && one.at == stage::asked && ready) {
            key_.empty() ? read_hello(one, now) : read_answer(one, now);
        }
        if (!gone && one.at != stage::leaving && now >= one.due) {
            overdue(one, now, serving);
        }
        if (gone) {
            close(one.fd);
        }
        it = gone ? guests_.erase(it) : std::next(it);
    }
}

int door::let_in() {
    const auto first =
        std::find_if(guests_.begin(), guests_.end(), [](const guest & g) { return g.at == stage::waiting; });
    if (first == guests_.end()) {
        return -1;
    }
    say(*first, status::welcome);
    std::printf("serving %s\n", first->address.c_str());
    std::fflush(stdout);
    const int fd = first->fd;
    guests_.erase(first);
    return fd;
}

} // namespace oa_rpc
