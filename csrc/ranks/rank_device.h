// A model's devices as one rank of a tensor-parallel group sees them: its own real device, and a placeholder without
// storage for every other rank. llama.cpp's meta device over all of them (split mode tensor) then computes this rank's
// slices only, and asks us to add them up (rank_comm.h).
//
// Invariant: device j of every rank stands for rank j, so all ranks agree on which slice is whose.
#pragma once

#include "ggml-backend-impl.h"

#include <cstdint>

// The registry of RANK0, RANK1, ...; empty until oa_rank_devices_make.
ggml_backend_reg_t oa_rank_reg();

// Makes the devices of `n_ranks` ranks, of which `rank` is this process and computes on `own` with `n_threads` threads
// (0: that backend's default). minimal: it keeps few weights in memory (weight_window.h). Once per process.
void oa_rank_devices_make(int rank, int n_ranks, ggml_backend_dev_t own, int n_threads, bool minimal);

int oa_rank_own();   // -1 before
int oa_rank_count(); // 0 before
