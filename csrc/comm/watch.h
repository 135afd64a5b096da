// Ends waits that would never end. A rank that waits beats (one whose program beats for it while it computes, always);
// a rank that others wait for and that neither beats nor counts for the silence is given up: it is late, stopped or
// stuck. A rank whose process is gone is given up at once. The rest of the timeout is for the hosts that wait for this
// one (inter_host.h), so that they hear the name of the rank instead of finding their neighbour silent. A rank whose
// program beats for it but that computes for the whole timeout while others wait is given up too; other hosts that wait
// give up then as well, and may name its LM instead.
#pragma once

#include "intra_host.h"

#include <chrono>
#include <functional>
#include <string>
#include <vector>

class oa_watch {
  public:
    // `ranks`: of this host, by index.
    oa_watch(oa_intra_host & shm, std::vector<int> ranks, std::string host, double timeout, double silence);

    void begin(const oa_operation & op); // of an operation; all clocks start
    void progress() { moved_ = true; }   // something was done

    // To be called often while waiting; looks every 20 ms. `behind`: is the awaited rank this one (index on the host)?
    // Throws oa_comm_error when somebody has failed or is given up.
    void look(const std::function<bool(int)> & behind);

    double waited() const; // seconds since the last progress, as of the last look that was due

  private:
    using clock = std::chrono::steady_clock;

    void give_up(int index, const std::string & why);

    oa_intra_host &                shm_;
    const std::vector<int>         ranks_;
    const std::string              host_;
    const double                   timeout_, silence_;
    oa_operation                   op_;
    bool                           moved_ = false;
    clock::time_point              looked_, progress_;
    std::vector<uint64_t>          beats_;
    std::vector<clock::time_point> alive_;
};
