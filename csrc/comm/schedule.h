// How the hosts' sums of a chunk become the result at every LM: the part that tree, exchange and rabenseifner differ
// in.
//
// Several chunks are in flight. Each goes through phases: a phase's messages are posted when the phase before is
// complete, and chunks enter a phase in their order, so that the messages of two LMs match without numbers. Receives
// that need nothing of this host are posted when the chunk is opened, before its sum is ready.
#pragma once

#include "inter_host.h"
#include "wire.h"

#include <cstddef>
#include <memory>
#include <vector>

// The LMs by host, and which of them is this one and which the GM.
struct oa_lm_group {
    std::vector<int> ranks;
    int              me;
    int              gm;

    int n() const { return int(ranks.size()); }
};

class oa_schedule {
  public:
    virtual ~oa_schedule() = default;

    // At most `depth` chunks of at most `chunk` elements are open at once.
    void begin(const oa_wire & wire, size_t chunk, int depth);

    int  depth() const { return int(flights_.size()); }
    void open(char * result, size_t n); // the next chunk: where its result goes
    void start(const char * sum);       // of the next chunk that is open: the host's sum, kept until it is finished
    bool poll();                        // true when anything has moved
    int  n_opened() const { return n_opened_; }
    int  n_started() const { return n_started_; }
    int  n_finished() const { return n_finished_; } // chunks whose result is there

  protected:
    struct flight {
        const char *      sum = nullptr;
        char *            result;
        size_t            n;
        std::vector<int>  pending; // messages, by phase
        int               phase = -1;
        std::vector<char> inbox;  // what other hosts send
        std::vector<char> outbox; // what this one sends, where the wire format differs
    };

    oa_schedule(oa_inter_host & net, oa_lm_group group) : net_(net), group_(std::move(group)) {}

    virtual int    n_phases() const                = 0;
    virtual size_t inbox_size(size_t chunk) const  = 0; // bytes
    virtual size_t outbox_size(size_t chunk) const = 0; // bytes, when packing
    virtual void   post(flight & f)                = 0; // receives that can wait for nothing
    virtual void   enter(flight & f, int phase)    = 0; // all of the phase before is there
    virtual void   finish(flight & f)              = 0; // all is there

    void send(flight & f, int phase, oa_direction direction, int host, const char * data, size_t size);
    void receive(flight & f, int phase, oa_direction direction, int host, char * data, size_t size);

    oa_inter_host &   net_;
    const oa_lm_group group_;
    oa_wire           wire_ = {};

  private:
    template <typename F> void in_pieces(flight & f, int phase, size_t size, F && post);

    flight & at(int chunk) { return flights_[size_t(chunk) % flights_.size()]; }
    bool     advance();

    std::vector<flight> flights_;
    std::vector<int>    tickets_;
    int                 n_opened_ = 0, n_started_ = 0, n_finished_ = 0;
};

std::unique_ptr<oa_schedule> oa_make_tree(oa_inter_host & net, const oa_lm_group & group);
std::unique_ptr<oa_schedule> oa_make_exchange(oa_inter_host & net, const oa_lm_group & group);
std::unique_ptr<oa_schedule> oa_make_rabenseifner(oa_inter_host & net, const oa_lm_group & group);
