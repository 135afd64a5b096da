// ggml-rpc-server before it touches a device: which address, with which token, and the loop that lets clients in.
#include "rpc_door.h"
#include "rpc_hooks.h"
#include "rpc_socket.h"
#include "rpc_worker.h"

#include <cerrno>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdexcept>
#include <string>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>
#include <vector>

using namespace oa_rpc;

namespace {

constexpr int  USER_ERROR         = 2;
constexpr int  MOST_FAILED_STARTS = 5;
constexpr char USAGE[] =
    "options of oallama:\n"
    "      --listen ADDRESS             listen on another address than loopback; needs a token in the file that\n"
    "                                   OALLAMA_RPC_TOKEN_FILE names (at least 16 bytes, readable by its owner only)\n"
    "      --isolate                    serve clients in a process of their own; always so with a token\n";

struct options {
    std::string host    = "127.0.0.1";
    std::string port    = "50052";
    std::string listen  = "";
    bool        isolate = false;
};

options take_options(int * argc, char ** argv) {
    options taken;
    int     kept = 1;
    for (int i = 1; i < *argc; ++i) {
        const std::string arg   = argv[i];
        const bool        value = i + 1 < *argc;
        if (arg == "--isolate") {
            taken.isolate = true;
            continue;
        }
        if (arg == "--listen") {
            if (!value) {
                throw std::runtime_error("--listen: expected an address");
            }
            taken.listen = argv[++i];
            continue;
        }
        if (arg == "-h" || arg == "--help") {
            std::fputs(USAGE, stderr);
        } else if ((arg == "-H" || arg == "--host") && value) {
            taken.host = argv[i + 1];
        } else if ((arg == "-p" || arg == "--port") && value) {
            taken.port = argv[i + 1];
        }
        argv[kept++] = argv[i];
    }
    *argc      = kept;
    argv[kept] = nullptr;
    return taken;
}

bool asks_for_help(int argc, char ** argv) {
    for (int i = 1; i < argc; ++i) {
        if (std::strcmp(argv[i], "-h") == 0 || std::strcmp(argv[i], "--help") == 0) {
            return true;
        }
    }
    return false;
}

void refuse_unsafe(const options & wanted, const token & key) {
    if (!is_loopback(wanted.host)) {
        throw std::runtime_error("--host " + wanted.host + " is not loopback; to be reached from there: --listen " +
                                 wanted.host + " and a token in OALLAMA_RPC_TOKEN_FILE");
    }
    if (!wanted.listen.empty() && !is_loopback(wanted.listen) && key.empty()) {
        throw std::runtime_error("--listen " + wanted.listen +
                                 " needs a token: OALLAMA_RPC_TOKEN_FILE has to name a file with one");
    }
}

int bind_to(const std::string & host, const std::string & port) {
    addrinfo   hints  = {};
    addrinfo * found  = nullptr;
    hints.ai_socktype = SOCK_STREAM;
    hints.ai_flags    = AI_PASSIVE;
    hints.ai_family   = host == "localhost" ? AF_INET : AF_UNSPEC;
    if (const int error = getaddrinfo(host.c_str(), port.c_str(), &hints, &found)) {
        throw std::runtime_error(host + ":" + port + ": " + gai_strerror(error));
    }
    const int fd  = socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    const int yes = 1;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes));
    const bool bound = fd >= 0 && bind(fd, found->ai_addr, found->ai_addrlen) == 0;
    const int  error = errno;
    freeaddrinfo(found);
    if (!bound) {
        throw std::runtime_error("cannot listen on " + host + ":" + port + ": " + std::strerror(error));
    }
    return fd;
}

void accept_all(int listening, door & at) {
    while (true) {
        sockaddr_storage from;
        socklen_t        size = sizeof(from);
        auto *           peer = reinterpret_cast<sockaddr *>(&from);
        const int        fd   = accept4(listening, peer, &size, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (fd < 0) {
            return;
        }
        char      name[NI_MAXHOST] = "?";
        const int yes              = 1;
        getnameinfo(peer, size, name, sizeof(name), nullptr, 0, NI_NUMERICHOST);
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof(yes));
        set_up(fd);
        at.enter(fd, name);
    }
}

// The first worker's own words are on stderr; -1 becomes 1 for one that was killed.
int status_of(const worker & ended) {
    return WIFEXITED(ended.exit_status()) && WEXITSTATUS(ended.exit_status()) ? WEXITSTATUS(ended.exit_status()) : 1;
}

void report_end(const worker & ended) {
    const int status = ended.exit_status();
    if (WIFSIGNALED(status)) {
        std::printf("the worker ended by signal %d (%s); its client is disconnected, a new one starts\n",
                    WTERMSIG(status), strsignal(WTERMSIG(status)));
        std::fflush(stdout);
    }
}

// Lets clients in until the program is ended. Returns -1 in a worker, an exit status in the supervisor.
int supervise(const options & wanted, token key) {
    const std::string & host      = wanted.listen.empty() ? wanted.host : wanted.listen;
    const bool          secret    = !key.empty();
    const int           listening = bind_to(host, wanted.port);
    door                at(std::move(key));
    worker              serving;
    bool                listens = false;
    int                 failed  = 0;
    double              restart = 0; // not before
    while (true) {
        if (serving.is() == worker::state::none && now_s() >= restart && serving.start()) {
            close(listening);
            return -1; // `at` closes the clients' sockets in this process
        }
        std::vector<pollfd> polled = { { listens ? listening : -1, POLLIN, 0 }, { serving.control(), POLLIN, 0 } };
        at.add_to(polled);
        double due = at.next_due();
        if (serving.is() == worker::state::none) {
            due = std::min(due, restart);
        }
        poll(polled.data(), polled.size(), int(std::ceil(std::max(0.0, due - now_s()) * 1e3)));
        if (polled[1].revents) {
            serving.read_control();
            if (serving.is() == worker::state::none) {
                report_end(serving);
                failed  = serving.was_ready() ? 0 : failed + 1;
                restart = failed ? now_s() + 1 : 0;
                if (!listens || failed == MOST_FAILED_STARTS) {
                    return status_of(serving);
                }
            }
        }
        if (!listens && serving.is() == worker::state::ready) {
            if (listen(listening, 64) != 0) {
                throw std::runtime_error("cannot listen on " + host + ": " + std::strerror(errno));
            }
            listens = true;
            std::printf("listening on %s:%s, %s\n", host.c_str(), wanted.port.c_str(),
                        secret ? "for clients with the token" : "without a token");
            std::fflush(stdout);
        }
        at.step(polled, serving.is() == worker::state::serving);
        if (polled[0].revents) {
            accept_all(listening, at);
        }
        while (serving.is() == worker::state::ready) {
            const int client = at.let_in();
            if (client < 0 || !serving.hand_over(client)) {
                break;
            }
        }
    }
}

} // namespace

bool oa_rpc_may_listen(const char * host) {
    const char * file = std::getenv("OALLAMA_RPC_TOKEN_FILE");
    if (file && *file) {
        std::fprintf(stderr, "error: OALLAMA_RPC_TOKEN_FILE is set, which only ggml-rpc-server obeys\n");
        return false;
    }
    if (!is_loopback(host)) {
        std::fprintf(stderr, "error: an RPC server without a token listens on loopback only, not on %s\n", host);
        return false;
    }
    return true;
}

extern "C" int oa_rpc_server_main(int * argc, char ** argv) {
    try {
        const options wanted = take_options(argc, argv);
        if (asks_for_help(*argc, argv)) {
            return -1;
        }
        token key = own_token();
        refuse_unsafe(wanted, key);
        std::signal(SIGPIPE, SIG_IGN); // a client that is gone is an error of send(), not the end of the server
        if (key.empty() && wanted.listen.empty() && !wanted.isolate) {
            return -1;
        }
        return supervise(wanted, std::move(key));
    } catch (const std::exception & error) {
        std::fprintf(stderr, "error: %s\n", error.what());
        return USER_ERROR;
    }
}
