// What ranks tell each other: partial results are added up (called by llama.cpp's meta backend, whose
// `ggml_backend_comm_*` functions these are), rank 0's calls and slices of the logits travel over MPI.
//
// All calls come from the thread that computes, one at a time.
#pragma once

#include "comm_types.h"
#include "ggml-backend.h"

#include <string>
#include <vector>

struct oa_rank_comm_settings {
    std::string         host;           // id of this rank's host; empty: its name
    std::vector<double> speeds;         // by rank, in any unit: the fastest of a host speaks for it; empty: all alike
    double              timeout   = 60; // seconds until a rank that others wait for is given up
    oa_algorithm        algorithm = OA_AUTO;
    oa_wire_format      wire      = OA_WIRE_NATIVE;
    // PCI address of this rank's CUDA device, to add up in its memory; empty: in host memory. All ranks or none: where
    // one cannot, none does, and rank 0 says why.
    std::string cuda_device;
};

// Starts MPI, unless it runs already, and measures the links if the algorithm is to be chosen. Throws
// std::runtime_error. Collective.
void oa_rank_comm_start(const oa_rank_comm_settings & settings, int & rank, int & n_ranks);
// Rank 0 has finished: the others' next broadcast says so. Then MPI ends, if we started it. After a failure all ranks
// are ended at once, since those that are gone or stuck would be waited for.
void oa_rank_comm_end();

bool oa_rank_broadcast(void * data, size_t nbytes);
bool oa_rank_all_ok(bool ok, int * failed);
void oa_rank_gather(void * data, size_t nbytes, size_t n_rows, size_t stride, int owner);

// Why one of these failed; empty while all went well.
const char * oa_rank_error();

void * oa_rank_comm_init(ggml_backend_t * backends, size_t n_backends);
bool   oa_rank_comm_allreduce(void * comm, struct ggml_tensor ** tensors);
void   oa_rank_comm_free(void * comm);
