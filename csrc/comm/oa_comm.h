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

/* Measures the links that OA_AUTO goes by. 0 or -1. */
int oa_comm_probe(oa_comm_t comm);

/* A sign of life, for ranks that compute for longer than the silence. From any thread. */
void oa_comm_beat(oa_comm_t comm);

/* Why the last call failed; "" when it did not. Valid until the next call. */
const char * oa_comm_error(oa_comm_t comm);

void oa_comm_free(oa_comm_t comm);

#ifdef __cplusplus
}
#endif
