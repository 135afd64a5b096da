/* The all-reduce for C, and for an engine that knows nothing of csrc/comm: one opaque handle. allreduce.h says what the
 * calls mean. Every call of a group is made by all its ranks; a failed call leaves its reason with oa_comm_error(). */
#pragma once

#include "comm_types.h"

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct oa_comm * oa_comm_t;

struct oa_comm_options {
    const char * host;    /* id of this rank's host; NULL: its name */
    double       speed;   /* of this rank, any unit; <= 0: 1 */
    double       timeout; /* seconds; <= 0: 60 */
    double       silence; /* seconds, of ranks of this host, see allreduce.h; <= 0: half the timeout */
    size_t       area;    /* bytes of shared memory a rank; 0: 4 MiB */
};

/* `mpi_comm` points to an MPI_Comm of the MPI that this library was built with; NULL: MPI_COMM_WORLD. NULL is returned
 * when it fails, with the reason in `error` (of `size` bytes). */
oa_comm_t oa_comm_create(const void * mpi_comm, const struct oa_comm_options * options, char * error, size_t size);

int oa_comm_rank(oa_comm_t comm);
int oa_comm_size(oa_comm_t comm);

/* Sums `n` elements of all ranks into `buffer` of each. 0, or -1: see oa_comm_error(). */
int oa_comm_allreduce(oa_comm_t comm, void * buffer, enum oa_dtype dtype, size_t n, enum oa_algorithm algorithm,
                      enum oa_wire_format wire);

/* Sums in device memory: once, by all ranks. `device`: the PCI address of this rank's CUDA device, "cpu" for tests,
 * NULL when it has none. 0, or -1 when a rank cannot (no peer access, say): the group is usable, but not for the next
 * one. `eager`: see intra_host_device.h; 0. */
int oa_comm_open_device(oa_comm_t comm, const char * device, int eager);

/* The same as oa_comm_allreduce() for memory of that device. What was given to `stream` (a cudaStream_t; NULL: nothing)
 * comes first; the sum is there on return. */
int oa_comm_allreduce_device(oa_comm_t comm, void * buffer, enum oa_dtype dtype, size_t n, enum oa_algorithm algorithm,
                             enum oa_wire_format wire, void * stream);

/* Measures the links that OA_AUTO goes by. 0 or -1. */
int oa_comm_probe(oa_comm_t comm);

/* A sign of life, for ranks that compute for longer than the silence. From any thread. */
void oa_comm_beat(oa_comm_t comm);

/* Ends the operation that is going on with an error on every rank, and all that follow. From any thread. */
void oa_comm_abort(oa_comm_t comm, const char * why);

/* Why the last call failed; "" when it did not. Valid until the next call. */
const char * oa_comm_error(oa_comm_t comm);

void oa_comm_free(oa_comm_t comm);

#ifdef __cplusplus
}
#endif
