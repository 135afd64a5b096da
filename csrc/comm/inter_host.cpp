#include "inter_host.h"

#include "comm_error.h"
#include "mpi_call.h"

#include <chrono>
#include <climits>
#include <cstring>
#include <memory>
#if __has_include(<mpi-ext.h>)
#include <mpi-ext.h>
#endif

namespace {

MPI_Comm duplicate(MPI_Comm base, double timeout) {
    auto        copy = std::make_unique<MPI_Comm>(MPI_COMM_NULL);
    MPI_Request request;
    oa_mpi_check(MPI_Comm_idup(base, copy.get(), &request), "duplicate the communicator");
    try {
        oa_mpi_wait(request, timeout, "duplicate the communicator");
    } catch (...) {
        (void) copy.release(); // MPI writes there when the last rank comes after all
        throw;
    }
    oa_mpi_check(MPI_Comm_set_errhandler(*copy, MPI_ERRORS_RETURN), "set up the communicator");
    return *copy;
}

// The lowest rank that MPI knows to have died, -1 if it cannot tell (it must be started with --with-ft ulfm).
int dead_rank(MPI_Comm comm) {
    int dead = -1;
#ifdef OMPI_HAVE_MPI_EXT_FTMPI
    MPI_Group gone, all;
    if (MPIX_Comm_failure_ack(comm) == MPI_SUCCESS && MPIX_Comm_failure_get_acked(comm, &gone) == MPI_SUCCESS) {
        int n = 0;
        MPI_Group_size(gone, &n);
        if (n > 0) {
            const int first = 0;
            MPI_Comm_group(comm, &all);
            MPI_Group_translate_ranks(gone, 1, &first, all, &dead);
            MPI_Group_free(&all);
        }
        MPI_Group_free(&gone);
    }
#else
    (void) comm;
#endif
    return dead;
}

} // namespace

oa_inter_host::oa_inter_host(MPI_Comm base, double timeout) : timeout_(timeout) {
    // In the constructor's body: an exception leaves what was made so far to MPI_Finalize.
    control_       = duplicate(base, timeout);
    ways_[OA_UP]   = duplicate(base, timeout);
    ways_[OA_DOWN] = duplicate(base, timeout);
    MPI_Comm_rank(control_, &rank_);
    MPI_Comm_size(control_, &n_ranks_);
    const int * most = nullptr;
    int         set  = 0;
    MPI_Comm_get_attr(control_, MPI_TAG_UB, &most, &set);
    n_tags_ = set && *most < INT_MAX ? *most + 1 : INT_MAX;
    listen();
}

oa_inter_host::~oa_inter_host() {
    int finalized = 0;
    MPI_Finalized(&finalized);
    if (finalized) {
        return;
    }
    MPI_Cancel(&listening_);
    MPI_Wait(&listening_, MPI_STATUS_IGNORE);
    for (MPI_Comm * comm : { &ways_[OA_UP], &ways_[OA_DOWN], &control_ }) {
        MPI_Comm_free(comm);
    }
}

void oa_inter_host::listen() {
    oa_mpi_check(MPI_Irecv(&heard_, sizeof(heard_), MPI_BYTE, MPI_ANY_SOURCE, MPI_ANY_TAG, control_, &listening_),
                 "listen to the other hosts");
}

void oa_inter_host::gather_bytes(const void * mine, size_t size, void * all, const char * what,
                                 const std::function<void()> & meanwhile) {
    gathering_ = true;
    gathered_.resize(size * size_t(n_ranks_ + 1));
    char * from = gathered_.data();
    char * to   = from + size;
    std::memcpy(from, mine, size);
    MPI_Request request;
    oa_mpi_check(MPI_Iallgather(from, int(size), MPI_BYTE, to, int(size), MPI_BYTE, control_, &request), what);
    oa_mpi_wait(request, timeout_, what, meanwhile);
    std::memcpy(all, to, size * size_t(n_ranks_));
    gathering_ = false;
}

void oa_inter_host::begin(const oa_operation & op) {
    op_  = op;
    tag_ = op.tag() % n_tags_;
}

void oa_inter_host::add(const pending & p, MPI_Request request) {
    active_.push_back(request);
    pending_.push_back(p);
}

void oa_inter_host::send(oa_direction direction, int to, const void * data, size_t size, int ticket) {
    MPI_Request   request;
    const pending p    = { ticket, to, size, false };
    const int     code = MPI_Isend(data, int(size), MPI_BYTE, to, tag_, ways_[direction], &request);
    if (code != MPI_SUCCESS) {
        broken(p, code);
    }
    add(p, request);
}

void oa_inter_host::receive(oa_direction direction, int from, void * data, size_t size, int ticket) {
    MPI_Request   request;
    const pending p    = { ticket, from, size, true };
    const int     code = MPI_Irecv(data, int(size), MPI_BYTE, from, MPI_ANY_TAG, ways_[direction], &request);
    if (code != MPI_SUCCESS) {
        broken(p, code);
    }
    add(p, request);
}

bool oa_inter_host::poll(std::vector<int> & tickets) {
    if (polls_++ % 32 == 0) {
        hear();
    }
    if (active_.empty()) {
        return false;
    }
    indices_.resize(active_.size());
    statuses_.resize(active_.size());
    int       n    = 0;
    const int code = MPI_Testsome(int(active_.size()), active_.data(), &n, indices_.data(), statuses_.data());
    if (n == MPI_UNDEFINED || n == 0) {
        oa_mpi_check(code, "test messages");
        return false;
    }
    for (int i = 0; i < n; ++i) {
        const pending & p = pending_[size_t(indices_[size_t(i)])];
        if (code == MPI_ERR_IN_STATUS && statuses_[size_t(i)].MPI_ERROR != MPI_SUCCESS) {
            broken(p, statuses_[size_t(i)].MPI_ERROR);
        }
        finished(p, statuses_[size_t(i)]);
        tickets.push_back(p.ticket);
    }
    // Finished requests are null now; the order of the others matters to MPI alone.
    size_t kept = 0;
    for (size_t i = 0; i < active_.size(); ++i) {
        if (active_[i] != MPI_REQUEST_NULL) {
            active_[kept]    = active_[i];
            pending_[kept++] = pending_[i];
        }
    }
    active_.resize(kept);
    pending_.resize(kept);
    return true;
}

void oa_inter_host::finished(const pending & p, const MPI_Status & status) const {
    if (!p.receives) {
        return;
    }
    int size = 0;
    MPI_Get_count(&status, MPI_BYTE, &size);
    if (status.MPI_TAG != tag_ || size_t(size) != p.size) {
        throw oa_comm_error("rank " + std::to_string(p.peer) + " is not at the same operation: expected " +
                                std::to_string(p.size) + " bytes of " + op_.print() + ", got " + std::to_string(size) +
                                " bytes" + (status.MPI_TAG != tag_ ? " of another operation" : ""),
                            p.peer);
    }
}

void oa_inter_host::broken(const pending & p, int code) const {
    int kind = code;
    MPI_Error_class(code, &kind);
    const std::string peer = "rank " + std::to_string(p.peer);
    if (kind == MPI_ERR_TRUNCATE) {
        throw oa_comm_error(peer + " is not at the same operation: expected " + std::to_string(p.size) + " bytes of " +
                                op_.print() + ", got more",
                            p.peer);
    }
#ifdef OMPI_HAVE_MPI_EXT_FTMPI
    if (kind == MPIX_ERR_PROC_FAILED) {
        throw oa_comm_error(peer + " has died in " + op_.print(), p.peer);
    }
#endif
    throw oa_comm_error("lost rank " + std::to_string(p.peer) + " in " + op_.print() + ": " + oa_mpi_text(code),
                        p.peer);
}

void oa_inter_host::hear() {
    int       there = 0;
    const int code  = MPI_Test(&listening_, &there, MPI_STATUS_IGNORE);
    if (code != MPI_SUCCESS) {
        const int dead = dead_rank(control_);
        throw oa_comm_error((dead >= 0 ? "rank " + std::to_string(dead) + " has died" : oa_mpi_text(code)) +
                                std::string(" in ") + op_.print(),
                            dead);
    }
    if (there) {
        throw oa_comm_error(heard_.what, heard_.culprit);
    }
}

void oa_inter_host::check_timeout(double waited) const {
    if (waited < timeout_) {
        return;
    }
    for (const pending & p : pending_) {
        if (p.receives) {
            throw oa_comm_error("rank " + std::to_string(p.peer) + " has sent nothing for " +
                                    std::to_string(int(waited)) + " s in " + op_.print(),
                                p.peer);
        }
    }
    const int peer = pending_.empty() ? -1 : pending_.front().peer;
    throw oa_comm_error("rank " + std::to_string(peer) + " has taken nothing for " + std::to_string(int(waited)) +
                            " s in " + op_.print(),
                        peer);
}

void oa_inter_host::tell(const std::vector<int> & ranks, const std::string & what, int culprit) {
    told_.culprit = culprit;
    std::strncpy(told_.what, what.c_str(), sizeof(told_.what) - 1);
    std::vector<MPI_Request> sent;
    for (const int rank : ranks) {
        MPI_Request request;
        if (rank != rank_ && MPI_Isend(&told_, sizeof(told_), MPI_BYTE, rank, 0, control_, &request) == MPI_SUCCESS) {
            sent.push_back(request);
        }
    }
    // The message is small, but only MPI calls move it on; a first connection takes several.
    const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(200);
    int        done  = 0;
    int        polls = 0;
    while (std::chrono::steady_clock::now() < until && (!done || ++polls < 100)) {
        if (MPI_Testall(int(sent.size()), sent.data(), &done, MPI_STATUSES_IGNORE) != MPI_SUCCESS) {
            break;
        }
    }
}
