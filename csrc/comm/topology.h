// Who is where: the hosts, their ranks, the local master (LM) of each host and the global master (GM).
// Pure: every rank that is given the same descriptions makes the same topology.
#pragma once

#include <string>
#include <vector>

struct oa_rank_place {
    std::string host;  // ranks with equal ids share memory
    double      speed; // any unit, higher is faster
};

struct oa_host {
    std::string      id;
    std::vector<int> ranks; // ascending
    int              lm;    // its fastest rank; of equals the lowest
};

struct oa_topology {
    std::vector<oa_host> hosts;   // in the order of their lowest ranks
    std::vector<int>     host_of; // rank -> index into hosts
    int                  gm;      // index of the host whose LM is the fastest; of equals the one with the lowest LM

    int    n_ranks() const { return int(host_of.size()); }
    int    n_hosts() const { return int(hosts.size()); }
    size_t widest() const; // ranks of the largest host

    std::string print() const; // one line per host
};

// Throws oa_comm_error when there is no rank or a speed is not a positive number.
oa_topology oa_make_topology(const std::vector<oa_rank_place> & ranks);
