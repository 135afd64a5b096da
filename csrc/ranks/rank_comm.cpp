#include "rank_comm.h"

#include "ggml.h"
#include "oa_comm.h"
#include "rank_device.h"

#include <mpi.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <thread>
#include <vector>

namespace {

constexpr auto   grace            = std::chrono::seconds(1);
constexpr int    failed_exit_code = 3;
constexpr double silence          = 4;  // seconds without a sign of life; a rank shows ten a second
constexpr double loading          = 10; // timeouts between the first rank that has loaded and the last: disks differ

MPI_Comm    g_comm    = MPI_COMM_NULL;
bool        g_started = false; // MPI, by us
oa_comm_t   g_sums    = nullptr;
bool        g_devices = false; // sums in device memory
std::string g_error;

std::thread       g_heart;
std::atomic<bool> g_ended{ false };

oa_rank_comm_settings g_settings;

// mpirun ends all ranks when one ends like this. Rank 0 first: it has more to say.
[[noreturn]] void leave() {
    std::this_thread::sleep_for(oa_rank_own() == 0 ? grace : 3 * grace);
    std::_Exit(failed_exit_code);
}

// Said at once: whoever computes may not hand it on. A program on rank 0 that would go on without its ranks (a server)
// has a moment to answer what it was asked.
bool fail(const std::string & why) {
    if (!g_error.empty()) {
        return false;
    }
    g_error = why;
    if (oa_rank_own() != 0) {
        leave();
    }
    std::fprintf(stderr, "error: %s\n", why.c_str());
    std::thread(leave).detach();
    return false;
}

// Blocking MPI calls keep a core busy, and a rank that waits for the next request may wait for hours. `timeout`:
// seconds; 0: none.
bool wait(MPI_Request & request, const char * what, double timeout = 0) {
    using namespace std::chrono;
    const auto since = steady_clock::now();
    while (true) {
        int       done = 0;
        const int code = MPI_Test(&request, &done, MPI_STATUS_IGNORE);
        if (code != MPI_SUCCESS) {
            return fail(std::string("MPI failed: ") + what);
        }
        if (done) {
            return true;
        }
        const auto waited = steady_clock::now() - since;
        if (timeout > 0 && waited > duration<double>(timeout)) {
            return fail(std::string("no answer in time: ") + what);
        }
        if (waited < microseconds(50)) {
            std::this_thread::yield();
        } else {
            std::this_thread::sleep_for(std::min<nanoseconds>(waited / 8, milliseconds(2)));
        }
    }
}

// llama.cpp computes in buffers whose address is known where they are in this host's memory.
bool is_host(const ggml_tensor * tensor) {
    return tensor->buffer && ggml_backend_buffer_is_host(tensor->buffer);
}

bool add_up(float * values, size_t n, bool on_device) {
    const int code = on_device ? oa_comm_allreduce_device(g_sums, values, OA_F32, n, g_settings.algorithm,
                                                          g_settings.wire, nullptr) :
                                 oa_comm_allreduce(g_sums, values, OA_F32, n, g_settings.algorithm, g_settings.wire);
    return code == 0 || fail(oa_comm_error(g_sums));
}

bool is_cuda(const ggml_tensor * tensor) {
    if (!tensor->buffer) {
        return false;
    }
    ggml_backend_dev_t device = ggml_backend_buft_get_device(ggml_backend_buffer_get_type(tensor->buffer));
    return device && std::strcmp(ggml_backend_reg_name(ggml_backend_dev_backend_reg(device)), "CUDA") == 0;
}

struct rank_comm {
    ggml_backend_t     own;
    std::vector<float> staging; // for devices whose memory the host cannot address
};

} // namespace

void oa_rank_comm_start(const oa_rank_comm_settings & settings, int & rank, int & n_ranks) {
    g_settings  = settings;
    int running = 0;
    MPI_Initialized(&running);
    if (!running) {
        int provided = 0;
        if (MPI_Init_thread(nullptr, nullptr, MPI_THREAD_SERIALIZED, &provided) != MPI_SUCCESS) {
            throw std::runtime_error("MPI does not start");
        }
        g_started = true;
    }
    MPI_Comm_dup(MPI_COMM_WORLD, &g_comm);
    MPI_Comm_set_errhandler(g_comm, MPI_ERRORS_RETURN);
    MPI_Comm_rank(g_comm, &rank);
    MPI_Comm_size(g_comm, &n_ranks);

    if (!settings.speeds.empty() && settings.speeds.size() != size_t(n_ranks)) {
        throw std::runtime_error("speeds of " + std::to_string(settings.speeds.size()) + " ranks for " +
                                 std::to_string(n_ranks));
    }
    const double    speed   = settings.speeds.empty() ? 1 : settings.speeds[size_t(rank)];
    const char *    host    = settings.host.empty() ? nullptr : settings.host.c_str();
    oa_comm_options options = { host, speed, settings.timeout, std::min(silence, settings.timeout / 2), 0 };
    char            error[512];
    g_sums = oa_comm_create(&g_comm, &options, error, sizeof(error));
    if (!g_sums || (settings.algorithm == OA_AUTO && oa_comm_probe(g_sums) != 0)) {
        throw std::runtime_error(g_sums ? oa_comm_error(g_sums) : error);
    }
    const char * device = settings.cuda_device.empty() ? nullptr : settings.cuda_device.c_str();
    g_devices           = oa_comm_open_device(g_sums, device, 0) == 0;
    if (!g_devices && device && rank == 0) {
        std::fprintf(stderr, "ranks add up in host memory: %s\n", oa_comm_error(g_sums));
    }
    g_heart = std::thread([] {
        while (!g_ended) {
            oa_comm_beat(g_sums);
            std::this_thread::sleep_for(std::chrono::milliseconds(100));
        }
    });
}

void oa_rank_comm_end() {
    g_ended = true;
    if (g_heart.joinable()) {
        g_heart.join();
    }
    int finalized = 0;
    MPI_Finalized(&finalized);
    if (finalized || g_comm == MPI_COMM_NULL) {
        return;
    }
    if (!g_error.empty()) {
        std::_Exit(failed_exit_code);
    }
    if (oa_rank_own() == 0) {
        uint64_t nothing = 0;
        oa_rank_broadcast(&nothing, sizeof(nothing));
    }
    oa_comm_free(g_sums);
    MPI_Comm_free(&g_comm);
    if (g_started) {
        MPI_Finalize();
    }
}

const char * oa_rank_error() {
    return g_error.c_str();
}

bool oa_rank_broadcast(void * data, size_t nbytes) {
    MPI_Request request;
    MPI_Ibcast(data, int(nbytes), MPI_BYTE, 0, g_comm, &request);
    // The others wait for as long as rank 0's program likes; rank 0 finds them waiting.
    return wait(request, "telling a call to all ranks", oa_rank_own() == 0 ? g_settings.timeout : 0);
}

bool oa_rank_all_ok(bool ok, int * failed) {
    static int  mine, first; // after a timeout MPI may still write to them
    MPI_Request request;
    mine = first = ok ? oa_rank_count() : oa_rank_own();
    MPI_Iallreduce(&mine, &first, 1, MPI_INT, MPI_MIN, g_comm, &request);
    const char * what = "asking whether all ranks have loaded the model (a longer timeout gives them longer)";
    const bool   told = wait(request, what, loading * g_settings.timeout);
    *failed           = first;
    return told && first == oa_rank_count();
}

void oa_rank_gather(void * data, size_t nbytes, size_t n_rows, size_t stride, int owner) {
    const int rank = oa_rank_own();
    if (owner == 0 || (rank != 0 && rank != owner) || nbytes * n_rows == 0) {
        return;
    }
    auto *            rows = static_cast<char *>(data);
    std::vector<char> packed(nbytes * n_rows);
    MPI_Request       request;
    if (packed.size() > INT_MAX) {
        fail("2 GiB of logits at once are too many; a smaller batch has fewer");
        leave();
    }
    if (rank == owner) {
        for (size_t i = 0; i < n_rows; ++i) {
            std::memcpy(packed.data() + i * nbytes, rows + i * stride, nbytes);
        }
        MPI_Isend(packed.data(), int(packed.size()), MPI_BYTE, 0, owner, g_comm, &request);
    } else {
        MPI_Irecv(packed.data(), int(packed.size()), MPI_BYTE, owner, owner, g_comm, &request);
    }
    if (!wait(request, "logits on their way to rank 0", g_settings.timeout)) {
        leave();
    }
    for (size_t i = 0; rank == 0 && i < n_rows; ++i) {
        std::memcpy(rows + i * stride, packed.data() + i * nbytes, nbytes);
    }
}

// ---- ggml_backend_comm_* -------------------------------------------------------------------------------------------

void * oa_rank_comm_init(ggml_backend_t * backends, size_t n_backends) {
    GGML_ASSERT(n_backends == size_t(oa_rank_count()));
    return new rank_comm{ backends[oa_rank_own()], {} };
}

bool oa_rank_comm_allreduce(void * context, ggml_tensor ** tensors) {
    auto &        comm   = *static_cast<rank_comm *>(context);
    ggml_tensor * tensor = tensors[oa_rank_own()];
    GGML_ASSERT(tensor->type == GGML_TYPE_F32 && ggml_is_contiguous(tensor));
    const size_t n      = size_t(ggml_nelements(tensor));
    float *      values = static_cast<float *>(tensor->data);
    const bool   there  = g_devices && is_cuda(tensor); // added up where they are
    const bool   staged = !there && !is_host(tensor);
    if (staged) {
        comm.staging.resize(n);
        values = comm.staging.data();
    }
    if (!(tensor->flags & GGML_TENSOR_FLAG_COMPUTE)) { // this rank has no part of the weight
        if (there) {
            ggml_backend_synchronize(comm.own); // what was in this memory before may still be read
            ggml_backend_tensor_memset(tensor, 0, 0, n * sizeof(float));
        } else {
            std::fill_n(values, n, 0.0f);
        }
    } else if (staged) {
        ggml_backend_tensor_get_async(comm.own, tensor, values, 0, n * sizeof(float));
    }
    ggml_backend_synchronize(comm.own);
    if (!add_up(values, n, there)) {
        return false;
    }
    if (staged) {
        ggml_backend_tensor_set_async(comm.own, tensor, values, 0, n * sizeof(float));
        ggml_backend_synchronize(comm.own);
    }
    return true;
}

void oa_rank_comm_free(void * context) {
    delete static_cast<rank_comm *>(context);
}
