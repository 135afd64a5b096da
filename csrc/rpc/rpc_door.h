// Those who have connected and are not served yet: who they are, whether they know the token, who is next.
// No thread and nothing that blocks; a peer that says nothing, or one byte a second, keeps nobody else out.
#pragma once

#include "rpc_handshake.h"
#include "rpc_limit.h"

#include <list>
#include <poll.h>
#include <string>
#include <vector>

namespace oa_rpc {

class door {
  public:
    static constexpr size_t MOST         = 64; // at the door
    static constexpr size_t MOST_OF_ONE  = 8;  // address, before they have shown the token, or said hello
    static constexpr size_t MOST_WAITING = 16;
    static constexpr double GRACE_S      = 2.0; // a client that has just gone may still be cleared away
    static constexpr double GOODBYE_S    = 1.0; // for a verdict to be read before the connection is reset

    explicit door(token key) : key_(std::move(key)) {}
    ~door();

    // Takes over the connected, non-blocking socket.
    void enter(int fd, const std::string & address);

    // What to wait for, and until when (now_s(); a day ahead when nothing is due).
    void   add_to(std::vector<pollfd> & polled) const;
    double next_due() const;

    // After poll(): reads, answers and closes what is due. `serving`: the worker has a client.
    void step(const std::vector<pollfd> & polled, bool serving);

    // The socket of the client that has waited longest and may come in, now told so; -1 when there is none.
    int let_in();

    void close_all();

  private:
    enum class stage { asked, held, waiting, leaving };

    struct guest {
        int         fd;
        std::string address;
        stage       at;
        double      due;
        challenge   question;
        answer      reply;
        size_t      have; // bytes of reply
        bool        told; // that it has to wait
    };

    using guests = std::list<guest>;

    void   read_answer(guest & one, double now);
    void   read_hello(guest & one, double now);
    void   judge(guest & one, double now);
    void   refuse(guest & one, double now, const char * why);
    void   overdue(guest & one, double now, bool serving);
    void   say(guest & one, status is);
    void   leave(guest & one, double now);
    bool   make_room(const std::string & address);
    size_t waiting() const;

    token    key_;
    guests   guests_;
    failures failures_;
};

} // namespace oa_rpc
