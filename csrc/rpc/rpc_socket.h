// TCP as our RPC ends use it: addresses, deadlines, and connections that notice when the other end is gone.
#pragma once

#include "rpc_handshake.h"

#include <string>

namespace oa_rpc {

double now_s(); // monotonic

// 127.0.0.0/8, ::1 or localhost.
bool is_loopback(const std::string & host);

// A new connection. Its messages are sent at once. An end that vanished breaks it within OALLAMA_RPC_TIMEOUT seconds,
// by keep-alive and a limit on unacknowledged data; never when that is not set (upstream's behaviour). A process that
// lives but does not answer is not noticed: a graph may take long.
void set_up(int fd);

// A connected socket; throws std::runtime_error. `timeout_s` is for connecting.
int connect_to(const std::string & host, int port, double timeout_s);

// Reads and writes on a connected socket until a moment. Does not own it.
class socket_wire : public wire {
  public:
    socket_wire(int fd, double deadline) : deadline(deadline), fd_(fd) {}

    void read(void * data, size_t size) override;
    void write(const void * data, size_t size) override;

    double deadline; // as now_s()

  private:
    void wait(short events) const;

    int fd_;
};

} // namespace oa_rpc
