#include "mpi_call.h"

#include "comm_error.h"

#include <chrono>
#include <sched.h>
#include <thread>

std::string oa_mpi_text(int code) {
    char text[MPI_MAX_ERROR_STRING];
    int  length = 0;
    MPI_Error_string(code, text, &length);
    return std::string(text, size_t(length));
}

void oa_mpi_check(int code, const char * what) {
    if (code != MPI_SUCCESS) {
        throw oa_comm_error(std::string("cannot ") + what + ": " + oa_mpi_text(code));
    }
}

void oa_mpi_wait(MPI_Request & request, double timeout, const char * what, const std::function<void()> & meanwhile) {
    const auto until = std::chrono::steady_clock::now() + std::chrono::duration<double>(timeout);
    int        done  = 0;
    for (int polls = 0;; ++polls) {
        oa_mpi_check(MPI_Test(&request, &done, MPI_STATUS_IGNORE), what);
        if (done) {
            return;
        }
        if (std::chrono::steady_clock::now() > until) {
            throw oa_comm_error(std::string("cannot ") + what + ": not all ranks have come within " +
                                std::to_string(timeout) + " s");
        }
        if (meanwhile) {
            meanwhile();
        }
        // These waits are for ranks that start or measure: after a while they need the core more than this one.
        if (polls < 1000) {
            sched_yield();
        } else {
            std::this_thread::sleep_for(std::chrono::microseconds(100));
        }
    }
}
