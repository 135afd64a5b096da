#include "allreduce.h"

#include "comm_error.h"
#include "mpi_call.h"
#include "probe.h"
#include "sum.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <mutex>
#include <random>
#include <unistd.h>

namespace {

std::mutex mpi_turn;

// What the ranks tell each other once.
struct introduction {
    char     host[256];
    double   speed, timeout;
    int64_t  area;
    uint64_t token;
    int32_t  pid, descriptor;
    char     error[512];
};

std::string host_name() {
    char name[256] = {};
    gethostname(name, sizeof(name) - 1);
    return name;
}

std::vector<introduction> gather(oa_inter_host & net, const introduction & mine) {
    std::vector<introduction> all = net.gather(mine, "gather the hosts");
    for (size_t rank = 0; rank < all.size(); ++rank) {
        if (all[rank].error[0]) {
            throw oa_comm_error("rank " + std::to_string(rank) + ": " + all[rank].error, int(rank));
        }
    }
    return all;
}

void require(bool condition, const std::string & what) {
    if (!condition) {
        throw oa_comm_error(what);
    }
}

void check_thread() {
    int level = 0, is_main = 0;
    MPI_Query_thread(&level);
    MPI_Is_thread_main(&is_main);
    require(level >= MPI_THREAD_SERIALIZED || is_main,
            "MPI was started for one thread only: call from that thread, or start MPI with MPI_THREAD_SERIALIZED");
}

} // namespace

oa_allreduce::oa_allreduce(MPI_Comm comm, const oa_allreduce_options & options) : timeout_(options.timeout) {
    int started = 0;
    MPI_Initialized(&started);
    require(started != 0, "MPI is not initialized: call MPI_Init_thread first");
    check_thread();
    const std::lock_guard<std::mutex> lock(mpi_turn);
    require(std::isfinite(options.timeout) && options.timeout > 0,
            "the timeout must be a positive number of seconds, got " + std::to_string(options.timeout));
    net_ = std::make_unique<oa_inter_host>(comm, options.timeout);
    try {
        share_memory(options);
    } catch (...) {
        if (!net_->idle()) {
            (void) net_.release(); // MPI may still write to it
        }
        throw;
    }
}

void oa_allreduce::share_memory(const oa_allreduce_options & options) {
    introduction mine = {};
    std::strncpy(mine.host, (options.host.empty() ? host_name() : options.host).c_str(), sizeof(mine.host) - 1);
    mine.speed   = options.speed;
    mine.timeout = options.timeout;
    mine.area    = options.area;
    mine.pid     = getpid();
    auto all     = gather(*net_, mine);
    for (size_t r = 0; r < all.size(); ++r) {
        require(all[r].area == options.area && all[r].timeout == options.timeout,
                "all ranks must give the same area and timeout: expected " + std::to_string(options.area) + " and " +
                    std::to_string(options.timeout) + ", rank " + std::to_string(r) + " has " +
                    std::to_string(all[r].area) + " and " + std::to_string(all[r].timeout));
    }
    require(options.area > 0, "the area must be a positive number of bytes, got " + std::to_string(options.area));
    std::vector<oa_rank_place> places;
    for (const introduction & i : all) {
        places.push_back({ i.host, i.speed });
    }
    topology_ = oa_make_topology(places);

    const oa_host & host     = topology_.hosts[size_t(topology_.host_of[size_t(rank())])];
    const auto      index_of = [&](int rank) {
        return int(std::find(host.ranks.begin(), host.ranks.end(), rank) - host.ranks.begin());
    };
    const int n = int(host.ranks.size());
    shm_        = std::make_unique<oa_intra_host>(index_of(rank()), n, index_of(host.lm), size_t(options.area));
    // The LM makes the memory, the others attach to it, and all hear who could not.
    const size_t size    = oa_intra_host::segment_size(n, size_t(options.area));
    const auto   guarded = [&](auto && action) {
        try {
            action();
        } catch (const std::exception & error) {
            std::strncpy(mine.error, error.what(), sizeof(mine.error) - 1);
        }
        return gather(*net_, mine);
    };
    all = guarded([&] {
        if (shm_->is_lm()) {
            std::random_device random;
            mine.token = uint64_t(random()) << 32 | random();
            shm_->memory().create(size, mine.token);
            mine.descriptor = shm_->memory().descriptor();
        }
    });
    guarded([&] {
        const introduction & lm = all[size_t(host.lm)];
        if (!shm_->is_lm()) {
            shm_->memory().attach(lm.pid, lm.descriptor, size, lm.token);
        }
        shm_->attached();
    });
    shm_->memory().close_descriptor();
    const double silence = options.silence > 0 ? options.silence : options.timeout / 2;
    watch_               = std::make_unique<oa_watch>(*shm_, host.ranks, host.id, options.timeout, silence);
}

oa_allreduce::~oa_allreduce() {
    const std::lock_guard<std::mutex> lock(mpi_turn);
    if (broken_) {
        // Messages may still be on their way into these; the process ends soon.
        for (auto & schedule : schedules_) {
            (void) schedule.second.release();
        }
        (void) net_.release();
        (void) device_.release();
        (void) shm_.release();
        (void) new std::vector<char>(std::move(scratch_));
    }
}

oa_operation oa_allreduce::resolve(oa_dtype dtype, size_t n, oa_algorithm algorithm, oa_wire_format wire,
                                   int64_t chunk) const {
    require(dtype == OA_F32 || dtype == OA_F16 || dtype == OA_BF16,
            "the type must be float32, float16 or bfloat16, got number " + std::to_string(int(dtype)));
    require(algorithm >= OA_AUTO && algorithm <= OA_PIPELINED, "unknown algorithm number " + std::to_string(algorithm));
    require(wire == OA_WIRE_NATIVE || dtype == OA_F32,
            std::string("wire q8 is for float32, got ") + oa_dtype_name(dtype));
    require(wire == OA_WIRE_NATIVE || algorithm != OA_STAR, "the star has no wire q8: it knows no hosts");
    require(chunk >= 0, "a chunk must be a number of bytes, 0 for the model's, got " + std::to_string(chunk));
    const size_t            width = oa_dtype_size(dtype);
    const double            ratio = oa_wire_ratio(wire);
    const oa_algorithm_time best  = algorithm == OA_AUTO ? oa_choose(n * width, topology_, links_, ratio).best :
                                                           oa_predict(algorithm, n * width, topology_, links_, ratio);
    oa_operation            op;
    op.number    = n_operations_;
    op.n         = n;
    op.dtype     = dtype;
    op.algorithm = best.algorithm;
    op.wire      = wire;
    op.slices    = best.slices;
    // Whole cache lines and q8 blocks; no slot is larger than the message needs.
    const size_t most  = shm_->area() / width;
    const size_t asked = chunk > 0 ? size_t(chunk) / width : best.chunk > 0 ? best.chunk / width : most;
    op.chunk           = std::min(most, (std::max<size_t>(1, std::min(asked, n)) + 63) / 64 * 64);
    return op;
}

oa_schedule * oa_allreduce::schedule(const oa_operation & op) {
    if (topology_.n_hosts() == 1 || !shm_->is_lm()) {
        return nullptr;
    }
    oa_algorithm algorithm = oa_algorithm(op.algorithm);
    if (algorithm == OA_PIPELINED) {
        algorithm = topology_.n_hosts() == 2 ? OA_EXCHANGE : OA_RABENSEIFNER;
    }
    auto & schedule = schedules_[algorithm];
    if (!schedule) {
        oa_lm_group group = { {}, topology_.host_of[size_t(rank())], topology_.gm };
        for (const oa_host & host : topology_.hosts) {
            group.ranks.push_back(host.lm);
        }
        schedule = algorithm == OA_TREE     ? oa_make_tree(*net_, group) :
                   algorithm == OA_EXCHANGE ? oa_make_exchange(*net_, group) :
                                              oa_make_rabenseifner(*net_, group);
    }
    // Chunks on the wire at once: enough to fill it while some are waited for.
    const size_t slots = std::max<size_t>(1, shm_->area() / (op.chunk * oa_dtype_size(oa_dtype(op.dtype))));
    schedule->begin({ oa_dtype(op.dtype), oa_wire_format(op.wire) }, op.chunk, int(std::min<size_t>(slots, 8)));
    return schedule.get();
}

oa_operation oa_allreduce::allreduce(void * buffer, oa_dtype dtype, size_t n, oa_algorithm algorithm,
                                     oa_wire_format wire, int64_t chunk) {
    check_thread();
    const std::lock_guard<std::mutex> lock(mpi_turn);
    const oa_operation                op = resolve(dtype, n, algorithm, wire, chunk);
    together([&] { run(op, static_cast<char *>(buffer)); });
    ++n_operations_;
    return op;
}

void oa_allreduce::run(const oa_operation & op, char * buffer) {
    net_->begin(op);
    if (op.algorithm == OA_STAR) {
        watch_->begin(op);
        oa_run_star(*net_, *watch_, op, buffer, scratch_);
    } else if (topology_.n_ranks() > 1) {
        oa_run_hierarchical({ *shm_, *net_, *watch_, schedule(op), topology_.n_hosts() }, op, buffer);
    }
}

void oa_allreduce::open_device(const std::string & name, bool eager) {
    check_thread();
    const std::lock_guard<std::mutex> lock(mpi_turn);
    require(!broken_, "this group of ranks has failed before; make a new one");
    require(!device_, "this group of ranks has opened its devices before");
    device_ = std::make_unique<oa_intra_host_device>(*net_, *shm_, *watch_, topology_,
                                                     oa_device_options{ name, eager, timeout_ });
}

oa_operation oa_allreduce::allreduce_device(void * buffer, oa_dtype dtype, size_t n, oa_algorithm algorithm,
                                            oa_wire_format wire, void * stream) {
    check_thread();
    const std::lock_guard<std::mutex> lock(mpi_turn);
    require(device_ != nullptr, "values in device memory need open_device() first");
    oa_operation op = resolve(dtype, n, algorithm, wire, 0);
    op.slices       = device_->slices(n * oa_dtype_size(dtype));
    op.device       = 1;
    together([&] { run_device(op, static_cast<char *>(buffer), stream); });
    ++n_operations_;
    return op;
}

void oa_allreduce::run_device(const oa_operation & op, char * buffer, void * stream) {
    net_->begin(op);
    if (op.algorithm == OA_STAR) { // goes from rank to rank, whatever host: nothing for the phase inside one
        const size_t      size = op.n * oa_dtype_size(oa_dtype(op.dtype));
        std::vector<char> values(size);
        device_->device().copy(values.data(), buffer, size, stream);
        watch_->begin(op);
        oa_run_star(*net_, *watch_, op, values.data(), scratch_);
        device_->device().copy(buffer, values.data(), size, stream);
    } else if (topology_.n_ranks() > 1) {
        device_->run(op, buffer, schedule(op), stream);
    }
}

// What fails on this rank ends on all.
template <typename F> void oa_allreduce::together(F && action) {
    require(!broken_, "this group of ranks has failed before; make a new one");
    try {
        shm_->throw_failure();
        action();
    } catch (const oa_comm_error & error) {
        break_up(error.what(), error.rank());
        throw;
    } catch (const std::exception & error) { // no memory left
        const oa_comm_error ours("rank " + std::to_string(rank()) + " has failed: " + error.what(), rank());
        break_up(ours.what(), ours.rank());
        throw ours;
    }
}

// All waits of this host end, and the LMs of the others hear of it.
void oa_allreduce::break_up(const std::string & what, int culprit) {
    broken_ = true;
    shm_->fail(what, culprit);
    const int       me   = topology_.host_of[size_t(rank())];
    const oa_host & host = topology_.hosts[size_t(me)];
    // One of the host's ranks tells: its LM, or all others when that is the one that is missing.
    if (!shm_->is_lm() && culprit != host.lm) {
        return;
    }
    std::vector<int> others;
    for (const oa_host & other : topology_.hosts) {
        if (&other != &host) {
            others.push_back(other.lm);
        }
    }
    net_->tell(others, what, culprit);
}

const oa_links & oa_allreduce::probe() {
    check_thread();
    const std::lock_guard<std::mutex> lock(mpi_turn);
    // All-reduces that end at the host: what the phase inside it costs.
    const auto in_host = [&](size_t n, bool slices) {
        oa_operation op;
        op.number    = n_operations_;
        op.n         = n;
        op.chunk     = std::min(n, shm_->area() / sizeof(float));
        op.algorithm = OA_PIPELINED;
        op.slices    = slices;
        std::vector<char> buffer(n * sizeof(float));
        oa_run_hierarchical({ *shm_, *net_, *watch_, nullptr, 1 }, op, buffer.data());
    };
    together([&] {
        net_->begin({});
        watch_->begin({});
        links_ = oa_probe({ *net_, *watch_, topology_, scratch_, in_host });
    });
    return links_;
}

void oa_allreduce::abort(const std::string & why) {
    shm_->fail("aborted by rank " + std::to_string(rank()) + ": " + why, rank());
}
