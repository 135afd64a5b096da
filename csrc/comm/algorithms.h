// The algorithms and the order in which each adds up; every rank gets the same bits, in every run.
//
// star          Every rank sends its values to rank 0, which adds them in the order of the ranks (f32) and sends the
//               result to every rank. Knows nothing of hosts: the reference that the others are compared with.
// The others have three phases: the sum of a host, in the order of its ranks (f32), rounded to the element type or
// packed for the wire; between the LMs; copies to the ranks of each host. Between the LMs:
// tree          LM -> GM -> LM. In the order of the hosts (f32).
// exchange      LM <-> LM recursive doubling. Pairwise: (h0 + h1) + (h2 + h3), rounded after every step.
// rabenseifner  reduce-scatter and all-gather. In the order of the hosts (f32).
// These take the message in pieces of the area, one after the other.
// pipelined     exchange (two hosts) or rabenseifner (more), in chunks: while one is on the wire the next is summed and
//               the one before copied out. The order is that of the algorithm inside.
//
// Rounding: f32 sums of P values differ from exact ones by at most (P - 1) 2^-24 sum |x|. f16 and bf16 are rounded,
// with u = 2^-11 and 2^-8, once in a host, once at the end, and in exchange once per step: at most (2 + log2 H) u sum
// |x|. Measured (tests/support/comm_worker.py, a million values over 14 octaves, 8 ranks on 3 hosts; error norm / norm
// of the sums): f32 5e-8, f16 3e-4, bf16 2.3e-3; star, which rounds once, f16 2e-4, bf16 1.7e-3; exchange, which rounds
// most, f16 3.4e-4, bf16 2.7e-3. q8: wire.h.
#pragma once

#include "inter_host.h"
#include "intra_host.h"
#include "schedule.h"
#include "watch.h"

// Sends everything to rank 0. `scratch`: n_ranks * OA_STAR_BLOCK bytes at rank 0, else unused.
constexpr size_t OA_STAR_BLOCK = 4 << 20;
void             oa_run_star(oa_inter_host & net, oa_watch & watch, const oa_operation & op, char * buffer,
                             std::vector<char> & scratch);

// The three phases with chunks of op.chunk elements. `schedule`: of the LM's between the hosts; null elsewhere, and
// when there is one host.
struct oa_hierarchy {
    oa_intra_host & shm;
    oa_inter_host & net;
    oa_watch &      watch;
    oa_schedule *   schedule;
    int             n_hosts;
};

void oa_run_hierarchical(const oa_hierarchy & hierarchy, const oa_operation & op, char * buffer);
