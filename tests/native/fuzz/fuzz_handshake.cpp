// The handshake before the first command, from both sides. The first byte chooses:
// 0: our client, greeted by a server that sends anything; 1: the same by one that knows the token, with any verdicts;
// 2: the client's hello; 3: our door, with a token; 4: our door without one; 5: an answer of any bytes is wrong.
#include "ggml-backend.h"
#include "rpc_door.h"
#include "rpc_socket.h"

#include <cstring>
#include <fcntl.h>
#include <stdexcept>
#include <sys/socket.h>
#include <unistd.h>

using namespace oa_rpc;

extern "C" void __wrap_ggml_backend_dev_memory(ggml_backend_dev_t, size_t * free, size_t * total) {
    *free = *total = 1 << 26;
}

namespace {

const token KEY(32, 7);

struct memory : wire {
    const uint8_t * data;
    size_t          size;
    bool            honest;
    challenge       asked = {};
    answer          given = {};
    bool            first = true;

    memory(const uint8_t * data, size_t size, bool honest) : data(data), size(size), honest(honest) {}

    void read(void * to, size_t n) override {
        if (honest && first) {
            asked = make_challenge();
            std::memcpy(to, &asked, n);
            first = false;
            return;
        }
        if (n > size) {
            throw std::runtime_error("the end");
        }
        std::memcpy(to, data, n);
        if (honest && n == sizeof(verdict) && size % 8 != 0) {
            const verdict said = make_verdict(KEY, asked, given, status(data[0] % 5));
            std::memcpy(to, &said, n);
        }
        data += n;
        size -= n;
    }

    void write(const void * from, size_t n) override {
        if (n == sizeof(answer)) {
            std::memcpy(&given, from, n);
        }
    }
};

// A few guests, whose bytes come in pieces; each may hang up.
void at_the_door(const uint8_t * data, size_t size, const token & key) {
    door             at(key);
    std::vector<int> peers;
    for (size_t i = 0; i + 2 <= size;) {
        const uint8_t what = data[i], n = data[i + 1];
        i += 2;
        int pair[2];
        if ((what % 4 == 0 || peers.empty()) && peers.size() < 24 &&
            socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, pair) == 0) {
            at.enter(pair[0], std::string(1, char('a' + what % 3)));
            peers.push_back(pair[1]);
        }
        int &        peer = peers[n % peers.size()];
        const size_t some = std::min<size_t>(n, size - i);
        if (what % 4 == 1 && peer >= 0) {
            close(peer);
            peer = -1;
        } else if (peer >= 0 && some > 0) {
            if (what % 4 == 2 && some >= 80) { // a right answer to what was asked
                challenge asked;
                if (recv(peer, &asked, sizeof(asked), MSG_DONTWAIT) == sizeof(asked)) {
                    const answer given = make_answer(key, asked, wish(what % 2));
                    send(peer, &given, sizeof(given), MSG_DONTWAIT | MSG_NOSIGNAL);
                }
            } else {
                send(peer, data + i, some, MSG_DONTWAIT | MSG_NOSIGNAL);
            }
            i += some;
        }
        std::vector<pollfd> polled;
        at.add_to(polled);
        poll(polled.data(), polled.size(), 0);
        at.step(polled, what & 16);
        at.next_due();
        const int in = what & 32 ? at.let_in() : -1;
        if (in >= 0) {
            close(in);
        }
    }
    for (const int peer : peers) {
        if (peer >= 0) {
            close(peer);
        }
    }
}

} // namespace

extern "C" int LLVMFuzzerInitialize(int *, char ***) {
    const int nowhere = open("/dev/null", O_WRONLY);
    dup2(nowhere, STDOUT_FILENO);
    return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t * data, size_t size) {
    if (size == 0) {
        return 0;
    }
    const uint8_t what = *data++ % 6;
    --size;
    memory connection(data, size, what == 1);
    try {
        switch (what) {
            case 0:
            case 1: greet(connection, KEY, "it", wish::wait, [](const char *) {}); break;
            case 2: hello(connection, "it"); break;
            case 3: at_the_door(data, size, KEY); break;
            case 4: at_the_door(data, size, {}); break;
            default: {
                answer          given = {};
                const challenge asked = make_challenge();
                std::memcpy(&given, data, std::min(size, sizeof(given)));
                if (is_right(KEY, asked, given)) {
                    __builtin_trap();
                }
            }
        }
        if (what == 0) {
            __builtin_trap(); // only who knows the token is trusted
        }
    } catch (const std::runtime_error &) {
    }
    return 0;
}
