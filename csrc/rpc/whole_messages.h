// Messages in few packets. ggml-rpc sends a message in three parts, and TCP_NODELAY makes each a packet of its own, for
// which the receiver wakes. Here parts wait until the message is whole (patch 0029). The bytes are the same.
#pragma once

#if defined(__linux__)
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

// Flags for send() of a part.
inline int oa_rpc_part() {
    return MSG_MORE;
}

// The message is whole: what waits is sent. Setting the option sends it.
inline void oa_rpc_whole(int fd) {
    const int on = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
}
#else
inline int oa_rpc_part() {
    return 0;
}

template <typename Socket> void oa_rpc_whole(Socket) {}
#endif
