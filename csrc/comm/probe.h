// Measures what choose.h wants to know of the network and the hosts.
#pragma once

#include "choose.h"
#include "host_stage.h"

#include <functional>

// A collective of all ranks; all get the same numbers. Between hosts: ping-pong of the GM with every other LM in turn,
// medians at sizes from 1 KiB to 1 MiB, alpha and 1/bandwidth by least squares of the relative error, bursts of small
// messages for the gap, the slowest pair counts. Inside: `in_host(n, slices)` must do one all-reduce of n f32 in this
// host only; the slowest host counts.
oa_links oa_probe(oa_host_stage & net, const oa_topology & topology, double timeout,
                  const std::function<void(size_t, bool)> & in_host);

// alpha and beta of seconds = alpha + beta * bytes, neither negative; every point weighs by 1 / seconds^2.
void oa_fit_line(const std::vector<double> & bytes, const std::vector<double> & seconds, double & alpha, double & beta);
