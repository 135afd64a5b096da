// Who speaks to whom, before the first RPC command: both sides show that they know the token, without sending it.
//
//   server -> client   challenge   a random number
//   client -> server   answer      another one, HMAC(token, "client", both, wish)
//   server -> client   verdict     HMAC(token, "server", both, status); `queued` may come before the last one
//
// Without a token nothing is sent: the wire is upstream's.
#pragma once

#include "rpc_auth.h"

#include <stdexcept>
#include <string>

namespace oa_rpc {

constexpr char    MAGIC[9]            = "OARPC\x01\r\n"; // 8 bytes on the wire
constexpr size_t  MAGIC_BYTES         = 8;
constexpr double  HANDSHAKE_TIMEOUT_S = 5.0;
constexpr uint8_t CMD_HELLO           = 14; // a client's first command

enum class status : uint8_t { welcome, refused, busy, queued };
enum class wish : uint8_t { wait, know_if_busy };

struct challenge {
    char   magic[MAGIC_BYTES];
    digest number;
};

struct answer {
    char    magic[MAGIC_BYTES];
    wish    wanted;
    uint8_t zero[7];
    digest  number;
    digest  mac;
};

struct verdict {
    status  is;
    uint8_t zero[7];
    digest  mac;
};

static_assert(sizeof(challenge) == 40 && sizeof(answer) == 80 && sizeof(verdict) == 40, "no padding on the wire");

challenge make_challenge();
answer    make_answer(const token & key, const challenge & asked, wish wanted);
bool      is_right(const token & key, const challenge & asked, const answer & given);
verdict   make_verdict(const token & key, const challenge & asked, const answer & given, status is);

// The server closed the connection before it asked anything: it has too many from this address.
struct turned_away : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// The other end closed the connection.
struct closed : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// A connection whose read and write throw std::runtime_error at its end or when they take too long.
class wire {
  public:
    virtual ~wire()                                    = default;
    virtual void read(void * data, size_t size)        = 0;
    virtual void write(const void * data, size_t size) = 0;
};

// The client's side. `peer` is the server's name in messages; `queued` is called when the server says that it is busy
// and we wait. Throws std::runtime_error: what it cannot accept, in one line.
void greet(wire & connection, const token & key, const std::string & peer, wish wanted, void (*queued)(const char *));

// Hello and the number of devices, after greet() or without a token. Throws as it does.
void hello(wire & connection, const std::string & peer);

} // namespace oa_rpc
