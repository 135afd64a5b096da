// The client: keeps its connections awake, shows the token, and asks a server who it is before ggml connects.
#include "ggml-rpc.h"
#include "rpc_hooks.h"
#include "rpc_socket.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>
#include <unistd.h>

using namespace oa_rpc;

namespace {

constexpr double  WAIT_S        = 30 * 86400.0; // in the server's queue
constexpr double  TURNED_AWAY_S = 0.5;          // until the next try
constexpr uint8_t CMD_DEVICES   = 15;
constexpr size_t  CAPABILITIES  = 24;
constexpr size_t  DEFAULT_HASH  = 10 * 1024 * 1024; // upstream's HASH_THRESHOLD

void say_queued(const char * peer) {
    std::fprintf(stderr, "%s is busy with another client: waiting\n", peer);
}

// Sends a command without a body of meaning and reads an answer of fixed size. A server of ours that wants a token
// has spoken before it was asked: then its magic is where the size should be.
void ask(wire & connection, uint8_t command, size_t n_zeros, void * answered, uint64_t size, const std::string & peer) {
    const std::string zeros(n_zeros, '\0');
    const uint64_t    length = n_zeros;
    uint64_t          got    = 0;
    connection.write(&command, 1);
    connection.write(&length, sizeof(length));
    connection.write(zeros.data(), zeros.size());
    connection.read(&got, sizeof(got));
    if (std::memcmp(&got, MAGIC, MAGIC_BYTES) == 0) {
        throw std::runtime_error(peer + " wants a token: OALLAMA_RPC_TOKEN_FILE is not set here");
    }
    if (got != size) {
        throw std::runtime_error(peer + " is not an RPC server");
    }
    connection.read(answered, size);
}

} // namespace

namespace oa_rpc {

void hello(wire & connection, const std::string & peer) {
    uint8_t version[4 + CAPABILITIES];
    ask(connection, CMD_HELLO, CAPABILITIES, version, sizeof(version), peer);
    if (version[0] != RPC_PROTO_MAJOR_VERSION || version[1] > RPC_PROTO_MINOR_VERSION) {
        char text[100];
        std::snprintf(text, sizeof(text), " speaks version %d.%d.%d, ours is %d.%d.%d; update one of them", version[0],
                      version[1], version[2], RPC_PROTO_MAJOR_VERSION, RPC_PROTO_MINOR_VERSION,
                      RPC_PROTO_PATCH_VERSION);
        throw std::runtime_error(peer + text);
    }
    uint32_t devices = 0;
    ask(connection, CMD_DEVICES, 0, &devices, sizeof(devices), peer);
    if (devices == 0) {
        throw std::runtime_error(peer + " has no devices");
    }
}

} // namespace oa_rpc

void oa_rpc_connecting(int fd) {
    set_up(fd);
}

bool oa_rpc_connected(int fd, const char * host, int port) {
    const std::string endpoint = std::string(host) + ":" + std::to_string(port);
    try {
        const token key = token_for(endpoint);
        if (!key.empty()) {
            socket_wire connection(fd, now_s() + HANDSHAKE_TIMEOUT_S);
            const auto  queued = [](const char * peer) { say_queued(peer); };
            // The challenge comes at once; a place in the queue may take as long as another client stays.
            struct patient : wire {
                socket_wire & under;
                bool          asked = false;
                explicit patient(socket_wire & under) : under(under) {}
                void read(void * data, size_t size) override {
                    under.read(data, size);
                    under.deadline = now_s() + WAIT_S;
                }
                void write(const void * data, size_t size) override { under.write(data, size); }
            } waiting(connection);
            greet(waiting, key, "the RPC server at " + endpoint, wish::wait, queued);
        }
        return true;
    } catch (const std::exception & error) {
        // ggml's client can only abort when it cannot connect. This is the user's mistake and needs no backtrace.
        std::fprintf(stderr, "error: %s\n", error.what());
        std::fflush(nullptr);
        std::_Exit(1);
    }
}

bool oa_rpc_hashes(size_t size) {
    static const size_t limit = [] {
        const char * variable = std::getenv("OALLAMA_RPC_HASH_BYTES");
        return variable && *variable ? size_t(std::strtoull(variable, nullptr, 10)) : DEFAULT_HASH;
    }();
    return size > limit;
}

namespace {

struct endpoint_parts {
    std::string host;
    int         port;
};

endpoint_parts parse(const std::string & name) {
    const size_t      colon = name.rfind(':');
    const std::string tail  = colon == std::string::npos ? "" : name.substr(colon + 1);
    const bool digits = !tail.empty() && tail.size() <= 5 && tail.find_first_not_of("0123456789") == std::string::npos;
    const int  port   = digits ? std::atoi(tail.c_str()) : 0;
    if (colon == 0 || port <= 0 || port > 65535) {
        throw std::runtime_error("expected host:port, not '" + name + "'");
    }
    return { name.substr(0, colon), port };
}

void say_hello(const std::string & name, const token & key, double deadline) {
    const endpoint_parts to   = parse(name);
    const std::string    peer = "the RPC server at " + name;
    int                  fd   = -1;
    try {
        fd = connect_to(to.host, to.port, deadline - now_s());
    } catch (const std::runtime_error & error) {
        throw std::runtime_error("no RPC server answers at " + name + ": " + error.what());
    }
    struct closing {
        int fd;
        ~closing() { close(fd); }
    } at_the_end{ fd };
    socket_wire connection(fd, deadline);
    try {
        if (!key.empty()) {
            greet(connection, key, peer, wish::know_if_busy, nullptr);
        }
        hello(connection, peer);
    } catch (const std::runtime_error & error) {
        const std::string said = error.what();
        if (said.find(name) != std::string::npos) {
            throw;
        }
        throw std::runtime_error(peer + " did not say hello: " + said +
                                 " (it is busy with another client, or no RPC server)");
    }
}

} // namespace

void oa_rpc_hello(const char * endpoint, double timeout_s) {
    const token  key      = token_for(endpoint);
    const double deadline = now_s() + timeout_s;
    while (true) {
        try {
            return say_hello(endpoint, key, deadline);
        } catch (const turned_away &) {
            if (now_s() + TURNED_AWAY_S > deadline) {
                throw;
            }
            usleep(useconds_t(TURNED_AWAY_S * 1e6)); // failed attempts are forgotten soon
        }
    }
}
