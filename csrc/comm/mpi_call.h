// MPI calls whose failures become oa_comm_error. Every communicator of ours returns errors instead of aborting.
#pragma once

#include <functional>
#include <mpi.h>
#include <string>

// The text of an MPI error code.
std::string oa_mpi_text(int code);

// Throws when `code` is not MPI_SUCCESS. `what` completes "cannot ..".
void oa_mpi_check(int code, const char * what);

// Waits for a request of a collective and calls `meanwhile`, if any, which may throw; throws after `timeout` seconds.
// After that MPI may still read and write what the request is about: it must not be freed.
void oa_mpi_wait(MPI_Request & request, double timeout, const char * what,
                 const std::function<void()> & meanwhile = {});
