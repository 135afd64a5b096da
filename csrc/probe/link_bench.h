// Links: host <-> device transfers by size and kind of memory, and the price of one device change in a graph.
#pragma once

#include "bench_backend.h"

struct oa_link_timing {
    std::string direction; // "h2d" or "d2h"
    std::string memory;    // "pageable" or "pinned"
    size_t      nbytes;
    oa_timing   timing;
};

// Every size in both directions, pinned too where the device has a host buffer type; at most `max_s` each.
std::vector<oa_link_timing> oa_link_bench(const std::string & device, const std::vector<size_t> & sizes, double max_s);

// Seconds one change between `device` and the CPU adds to a graph in which both sides work, the copy of
// oa_switch_bytes, scheduling and waking threads included. It measures for at least five rounds and up to `max_s`.
double oa_switch_bench(const std::string & device, int n_threads, double max_s);

// Share of the shorter of copies to `device` and its computing that hides behind the longer when two threads drive
// them: 0 one after the other, 1 side by side. Each alone is measured for at most half of `max_s`.
double oa_overlap_bench(const std::string & device, int n_threads, double max_s);

// Share of the shorter of the computing of `device` and of the CPU that hides behind the longer, both as in decode, for
// parts that take about a millisecond on a CPU, at whose ends one side waits for the other. max_s: as above.
double oa_concurrency_bench(const std::string & device, int n_threads, double max_s);

constexpr size_t oa_switch_bytes = 4096 * sizeof(float);
