// Which algorithm for how many bytes: the alpha-beta model. Pure and printable. Two constants of the pipeline's chunks
// are tuned (choose.cpp says on what); all others come from the links.
#pragma once

#include "comm_types.h"
#include "topology.h"

#include <cstddef>
#include <string>
#include <vector>

// What a network and a host do, from probe.h or from a user.
struct oa_links {
    double      alpha;     // seconds of a small message between two hosts, one way, software included
    double      bandwidth; // bytes per second of a host's link, each way
    double      gap;       // seconds between two small messages of a rank, software again
    double      a;         // seconds until a rank that sleeps has seen what another rank of its host has counted
    double      b;         // bytes per second that every rank of a host copies when all do at once
    double      alone;     // bytes per second that one rank sums when the others wait
    std::string source;    // where these numbers are from
};

// What the algorithms are told before anything was measured: 1 Gbit Ethernet with 60 us one way and 10 us a message,
// and memory at 30 us and 4 GB/s a rank, 8 GB/s alone. Orders of magnitude, not measurements.
oa_links oa_assumed_links();

struct oa_algorithm_time {
    oa_algorithm algorithm;
    size_t       chunk;  // bytes at a time; 0: the whole message
    bool         slices; // inside a host every rank sums a slice; else its LM sums alone
    double       seconds;
};

struct oa_algorithm_choice {
    oa_algorithm_time              best;
    std::vector<oa_algorithm_time> all; // each algorithm with its best chunk
    std::string                    print() const;
};

// All that matters is the number of hosts and the ranks of the widest; `wire_ratio`: bytes on the wire per byte.
oa_algorithm_choice oa_choose(size_t n_bytes, const oa_topology & topology, const oa_links & links,
                              double wire_ratio = 1);

// One of them, whether it is the best or not.
oa_algorithm_time oa_predict(oa_algorithm algorithm, size_t n_bytes, const oa_topology & topology,
                             const oa_links & links, double wire_ratio = 1);
