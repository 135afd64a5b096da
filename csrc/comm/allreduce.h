// The all-reduce of one group of ranks: topology, phases and algorithms put together.
//
// Every rank makes one of these (a collective), then all call allreduce() with equal sizes, types and algorithms in the
// same order. After an error the group is unusable on every rank. Calls of all groups of a process take turns: MPI is
// never called from two threads at once.
#pragma once

#include "algorithms.h"
#include "choose.h"
#include "intra_host_device.h"
#include "topology.h"

#include <map>
#include <memory>
#include <mpi.h>
#include <string>
#include <vector>

struct oa_allreduce_options {
    std::string host;         // id; empty: the host's name
    double      speed   = 1;  // of this rank, any unit; the fastest of a host becomes its LM
    double      timeout = 60; // seconds without progress after which a wait ends; the star's rank 0 takes half of it
    double      silence = 0;  // seconds after which a rank of this host that shows no sign of life is given up;
                              // 0: half the timeout. Less needs beat() from a thread while a rank computes.
    int64_t area = 4 << 20;   // bytes of shared memory a rank (and two more of them) takes on its host
};

class oa_allreduce {
  public:
    // Throws oa_comm_error on every rank when one of them cannot; when one does not even come (or its timeout is
    // wrong), on the others after theirs.
    oa_allreduce(MPI_Comm comm, const oa_allreduce_options & options);
    ~oa_allreduce();

    oa_allreduce(const oa_allreduce &)             = delete;
    oa_allreduce & operator=(const oa_allreduce &) = delete;

    int                 rank() const { return net_->rank(); }
    const oa_topology & topology() const { return topology_; }
    const oa_links &    links() const { return links_; }

    // The sum of the ranks' buffers of `n` elements into each of them. `chunk`: bytes at a time, 0 for the model's.
    // Returns what was done, auto resolved.
    oa_operation allreduce(void * buffer, oa_dtype dtype, size_t n, oa_algorithm algorithm, oa_wire_format wire,
                           int64_t chunk = 0);

    // Makes this rank's device (see oa_open_device(); empty: it has none) one whose memory allreduce_device() sums. A
    // collective, once. Throws on every rank when one of them cannot; the group stays usable.
    void open_device(const std::string & name, bool eager = false);

    // The same for a buffer in device memory, on every rank. Work that was given to `stream` (the device's own kind;
    // null: no such work) comes first; the sum is there on return.
    oa_operation allreduce_device(void * buffer, oa_dtype dtype, size_t n, oa_algorithm algorithm, oa_wire_format wire,
                                  void * stream);

    // Measures the links, a collective; `auto` goes by them from then on.
    const oa_links & probe();
    void             set_links(const oa_links & links) { links_ = links; } // the same on every rank

    // A sign of life of this rank. From any thread.
    void beat() { shm_->beat(); }

    // Ends the operation that is going on, on every rank, and all that follow. From any thread; calls no MPI.
    void abort(const std::string & why);

  private:
    void         share_memory(const oa_allreduce_options & options);
    oa_operation resolve(oa_dtype dtype, size_t n, oa_algorithm algorithm, oa_wire_format wire, int64_t chunk) const;
    void         run(const oa_operation & op, char * buffer);
    void         run_device(const oa_operation & op, char * buffer, void * stream);
    void         break_up(const std::string & what, int culprit);

    template <typename F> void together(F && action);

    oa_schedule * schedule(const oa_operation & op);

    oa_topology                                          topology_;
    oa_links                                             links_ = oa_assumed_links();
    const double                                         timeout_;
    bool                                                 broken_ = false;
    std::unique_ptr<oa_inter_host>                       net_;
    std::unique_ptr<oa_intra_host>                       shm_;
    std::unique_ptr<oa_watch>                            watch_;
    std::unique_ptr<oa_intra_host_device>                device_;
    std::map<oa_algorithm, std::unique_ptr<oa_schedule>> schedules_;
    std::vector<char>                                    scratch_; // what the star and the probe receive
    uint64_t                                             n_operations_ = 0;
};
