// Measures what choose.h wants to know of the network and the hosts.
#pragma once

#include "choose.h"
#include "inter_host.h"
#include "watch.h"

#include <functional>
#include <vector>

struct oa_probe_context {
    oa_inter_host &                   net;
    oa_watch &                        watch;
    const oa_topology &               topology;
    std::vector<char> &               scratch; // outlives what is in flight
    std::function<void(size_t, bool)> in_host; // (n, slices): one all-reduce of n f32 in this host only
};

// A collective of all ranks; all get the same numbers. Between hosts: ping-pong of the GM with every other LM in turn,
// medians at sizes from 1 KiB to 1 MiB, alpha and 1/bandwidth by least squares of the relative error, bursts of small
// messages for the gap, the slowest pair counts. Inside the slowest host counts. Who waits for its turn waits no longer
// than the timeout either: at 10 Mbit/s, 20 s a pair, the default of 60 s is enough for three hosts.
oa_links oa_probe(const oa_probe_context & context);

// alpha and beta of seconds = alpha + beta * bytes, neither negative; every point weighs by 1 / seconds^2.
void oa_fit_line(const std::vector<double> & bytes, const std::vector<double> & seconds, double & alpha, double & beta);
