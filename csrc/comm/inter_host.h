// The phase between hosts: MPI messages between ranks, normally the LMs, none of whose waits blocks.
//
// Two directions have a communicator each (towards the sum, away from it); within one the messages of a pair of ranks
// match in the order they were posted. A tag says which operation a message belongs to and is checked on arrival, as is
// its length: ranks that ask for different operations get an error, not each other's data. A third communicator carries
// the news of a failure. MPI calls come from the thread that calls, one at a time.
#pragma once

#include "operation.h"

#include <cstddef>
#include <functional>
#include <mpi.h>
#include <string>
#include <vector>

enum oa_direction { OA_UP, OA_DOWN };

class oa_inter_host {
  public:
    // Collective over `base`. `timeout`: seconds until a silent rank is given up.
    oa_inter_host(MPI_Comm base, double timeout);
    ~oa_inter_host();

    oa_inter_host(const oa_inter_host &)             = delete;
    oa_inter_host & operator=(const oa_inter_host &) = delete;

    int rank() const { return rank_; }
    int n_ranks() const { return n_ranks_; }

    // What every rank gives, by rank: a collective of all, who must come within the timeout. `meanwhile` may throw.
    template <typename T>
    std::vector<T> gather(const T & mine, const char * what, const std::function<void()> & meanwhile = {}) {
        std::vector<T> all(static_cast<size_t>(n_ranks_));
        gather_bytes(&mine, sizeof(T), all.data(), what, meanwhile);
        return all;
    }

    void begin(const oa_operation & op);

    // `ticket` (any number >= 0) comes back from poll() when the memory is free or filled.
    void send(oa_direction direction, int to, const void * data, size_t size, int ticket);
    void receive(oa_direction direction, int from, void * data, size_t size, int ticket);

    // The tickets of what was finished since; true when there are any. Throws oa_comm_error when a message does not
    // fit, a rank has died or another host has failed.
    bool poll(std::vector<int> & tickets);
    // Whether MPI is done with all memory that it was given. When it is not, this object must not be destroyed.
    bool idle() const { return active_.empty() && !gathering_; }

    // Throws when `waited` seconds are too many, naming a rank that owes a message.
    void check_timeout(double waited) const;

    // Tells `ranks` of a failure, and waits a little for the message to leave. After it this object must neither be
    // used nor destroyed: messages may be on their way.
    void tell(const std::vector<int> & ranks, const std::string & what, int culprit);

  private:
    struct pending {
        int    ticket;
        int    peer;
        size_t size;
        bool   receives;
    };
    struct news {
        int  culprit;
        char what[1020];
    };

    void add(const pending & p, MPI_Request request);
    void finished(const pending & p, const MPI_Status & status) const;
    void gather_bytes(const void * mine, size_t size, void * all, const char * what,
                      const std::function<void()> & meanwhile);
    void listen();
    void hear();

    [[noreturn]] void broken(const pending & p, int code) const;

    const double timeout_;
    MPI_Comm     ways_[2] = { MPI_COMM_NULL, MPI_COMM_NULL };
    MPI_Comm     control_ = MPI_COMM_NULL;
    int          rank_ = 0, n_ranks_ = 0;
    oa_operation op_;
    int          tag_    = 0;
    int          n_tags_ = 0; // that MPI has

    std::vector<MPI_Request> active_;
    std::vector<pending>     pending_; // of the requests in active_
    std::vector<int>         indices_;
    std::vector<MPI_Status>  statuses_;
    MPI_Request              listening_ = MPI_REQUEST_NULL;
    news                     heard_     = {};
    news                     told_      = {};
    bool                     gathering_ = false;
    std::vector<char>        gathered_; // this rank's, then all
    unsigned                 polls_ = 0;
};
