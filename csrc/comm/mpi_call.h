// MPI calls whose failures become oa_comm_error. Every communicator of ours returns errors instead of aborting.
#pragma once

#include <mpi.h>

#include <string>

// The text of an MPI error code.
std::string oa_mpi_text(int code);

// Throws when `code` is not MPI_SUCCESS. `what` completes "cannot ..".
void oa_mpi_check(int code, const char * what);

// Waits for a request of a collective; throws after `timeout` seconds.
void oa_mpi_wait(MPI_Request & request, double timeout, const char * what);
