#include "oa_comm.h"

#include "allreduce.h"

#include <cstring>
#include <exception>
#include <mpi.h>

struct oa_comm {
    std::unique_ptr<oa_allreduce> group;
    std::string                   error;
};

namespace {

// Nothing is thrown through C.
template <typename F> int guarded(oa_comm_t comm, F && action) {
    comm->error.clear();
    try {
        action();
        return 0;
    } catch (const std::exception & error) {
        comm->error = error.what();
        return -1;
    }
}

} // namespace

oa_comm_t oa_comm_create(const void * mpi_comm, const oa_comm_options * options, char * error, size_t size) {
    oa_allreduce_options o;
    if (options) {
        o.host    = options->host ? options->host : "";
        o.speed   = options->speed > 0 ? options->speed : o.speed;
        o.timeout = options->timeout > 0 ? options->timeout : o.timeout;
        o.silence = options->silence > 0 ? options->silence : o.silence;
        o.area    = options->area > 0 ? int64_t(options->area) : o.area;
    }
    auto       comm = std::make_unique<oa_comm>();
    const auto make = [&] {
        const MPI_Comm base = mpi_comm ? *static_cast<const MPI_Comm *>(mpi_comm) : MPI_COMM_WORLD;
        comm->group         = std::make_unique<oa_allreduce>(base, o);
    };
    if (guarded(comm.get(), make) == 0) {
        return comm.release();
    }
    if (error && size > 0) {
        std::strncpy(error, comm->error.c_str(), size - 1);
        error[size - 1] = 0;
    }
    return nullptr;
}

int oa_comm_rank(oa_comm_t comm) {
    return comm->group->rank();
}

int oa_comm_size(oa_comm_t comm) {
    return comm->group->topology().n_ranks();
}

int oa_comm_allreduce(oa_comm_t comm, void * buffer, oa_dtype dtype, size_t n, oa_algorithm algorithm,
                      oa_wire_format wire) {
    return guarded(comm, [&] { comm->group->allreduce(buffer, dtype, n, algorithm, wire); });
}

int oa_comm_open_device(oa_comm_t comm, const char * device, int eager) {
    return guarded(comm, [&] { comm->group->open_device(device ? device : "", eager != 0); });
}

int oa_comm_allreduce_device(oa_comm_t comm, void * buffer, oa_dtype dtype, size_t n, oa_algorithm algorithm,
                             oa_wire_format wire, void * stream) {
    return guarded(comm, [&] { comm->group->allreduce_device(buffer, dtype, n, algorithm, wire, stream); });
}

int oa_comm_probe(oa_comm_t comm) {
    return guarded(comm, [&] { comm->group->probe(); });
}

void oa_comm_beat(oa_comm_t comm) {
    comm->group->beat();
}

void oa_comm_abort(oa_comm_t comm, const char * why) {
    comm->group->abort(why);
}

const char * oa_comm_error(oa_comm_t comm) {
    return comm->error.c_str();
}

void oa_comm_free(oa_comm_t comm) {
    delete comm;
}
