// Preloaded into mpirun where all ranks are on this machine: what would listen on all interfaces listens on loopback.
// Open MPI 5's launcher (PRRTE) binds its sockets to all interfaces, and has no parameter that changes that.

#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstring>

static int system_bind(int socket, const void * address, socklen_t size) {
    return int(syscall(SYS_bind, socket, address, size));
}

extern "C" int bind(int socket, const sockaddr * address, socklen_t size) noexcept {
    if (sockaddr_in v4; address->sa_family == AF_INET && size >= sizeof v4) {
        memcpy(&v4, address, sizeof v4);
        if (v4.sin_addr.s_addr == htonl(INADDR_ANY)) {
            v4.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
            return system_bind(socket, &v4, sizeof v4);
        }
    }
    if (sockaddr_in6 v6; address->sa_family == AF_INET6 && size >= sizeof v6) {
        memcpy(&v6, address, sizeof v6);
        if (IN6_IS_ADDR_UNSPECIFIED(&v6.sin6_addr)) {
            v6.sin6_addr = in6addr_loopback;
            return system_bind(socket, &v6, sizeof v6);
        }
    }
    return system_bind(socket, address, size);
}
