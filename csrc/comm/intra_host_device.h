// The phase inside a host for values in device memory: starts the steps of device_sum.h and sees to it that they end.
//
// The host's part goes through the same shared memory as the phase on the CPU: a rank counts what it has started, so
// that its waits, and what ends them, are those of intra_host.h and watch.h. Ranks on different devices start a step
// that waits at once and let the device look for the flags for a while; only when it gives up does the host wait until
// the other ranks have got there, and starts the step again. Ranks that share a device would take it from each other
// while they look: they wait on the host first, until what they need is there.
//
// With several hosts the LM fetches the host's sum to host memory, where the algorithms between hosts work on it as on
// any, and gives the result to the devices.
#pragma once

#include "device.h"
#include "inter_host.h"
#include "intra_host.h"
#include "schedule.h"
#include "topology.h"
#include "watch.h"

struct oa_device_options {
    std::string name;          // as for oa_open_device(); empty: this rank has none
    bool        eager = false; // start steps that wait at once also when ranks share a device; for tests
    double      timeout;
};

class oa_intra_host_device {
  public:
    // A collective of all ranks of all hosts; throws oa_comm_error on all of them when one cannot. Uses what it is
    // given as long as it lives.
    oa_intra_host_device(oa_inter_host & net, oa_intra_host & shm, oa_watch & watch, const oa_topology & topology,
                         const oa_device_options & options);
    ~oa_intra_host_device(); // waits a moment for the other ranks' to go

    oa_intra_host_device(const oa_intra_host_device &)             = delete;
    oa_intra_host_device & operator=(const oa_intra_host_device &) = delete;

    // Whether the ranks of a host add up slices of so many bytes.
    bool slices(size_t n_bytes) const { return n_hosts_ > 1 || oa_device_slices(n_bytes, shm_.n_ranks()) > 1; }

    // Sums into `buffer` in device memory; work on `stream` comes first. `schedule`: of the LM's between the hosts,
    // null elsewhere.
    void run(const oa_operation & op, void * buffer, oa_schedule * schedule, void * stream);

    oa_device & device() { return *device_; }

  private:
    void   exchange(const oa_device_options & options, const oa_host & host);
    size_t piece(const oa_operation & op) const;
    void   between_hosts();
    void   wire();

    void start(oa_device_step step, const void * from, void * to);
    void settle(oa_device_step step, void * to, oa_shm_event awaited);
    void await(oa_shm_event event);
    void finish();
    void count(oa_shm_event event);
    void compare_operations() const;

    oa_inter_host &            net_;
    oa_intra_host &            shm_;
    oa_watch &                 watch_;
    const int                  n_hosts_;
    const double               timeout_;
    std::unique_ptr<oa_device> device_;
    oa_device_report *         report_  = nullptr;
    char *                     sums_    = nullptr; // at the LM, with several hosts: what goes to the others
    char *                     results_ = nullptr; // and what comes back
    bool                       shared_  = false;   // a device has several ranks
    oa_device_call             call_    = {};      // of the piece that is being summed

    // Of the operation.
    const oa_operation * op_       = nullptr;
    oa_schedule *        schedule_ = nullptr;
    void *               stream_   = nullptr;
    uint64_t             total_    = 0; // pieces of all operations, up to this one
    bool                 compared_ = false;
};
