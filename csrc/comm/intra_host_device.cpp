#include "intra_host_device.h"

#include "comm_error.h"
#include "sum.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <sched.h>

namespace {

// How long a step looks for flags before it gives the device back. On different devices that is what a step of another
// rank takes; where ranks share one, all is there already, so giving up means that something is wrong.
constexpr uint64_t patience = 200 * 1000;

// What the ranks tell each other once.
struct introduction {
    oa_device_handle handle;
    char             error[512];
};

template <typename F>
std::vector<introduction> together(oa_inter_host & net, introduction & mine, const char * what, F && action) {
    try {
        action();
    } catch (const std::exception & error) {
        std::strncpy(mine.error, error.what(), sizeof(mine.error) - 1);
    }
    auto all = net.gather(mine, what);
    for (size_t rank = 0; rank < all.size(); ++rank) {
        if (all[rank].error[0]) {
            throw oa_comm_error("rank " + std::to_string(rank) + ": " + all[rank].error, int(rank));
        }
    }
    return all;
}

} // namespace

oa_intra_host_device::oa_intra_host_device(oa_inter_host & net, oa_intra_host & shm, oa_watch & watch,
                                           const oa_topology & topology, const oa_device_options & options) :
    net_(net),
    shm_(shm), watch_(watch), n_hosts_(topology.n_hosts()), timeout_(options.timeout) {
    const oa_host & host = topology.hosts[size_t(topology.host_of[size_t(net.rank())])];
    call_.rank           = shm.index();
    call_.n_ranks        = shm.n_ranks();
    call_.lm             = shm.lm();
    call_.buffer         = shm.area();
    call_.patience       = patience;
    exchange(options, host);
}

void oa_intra_host_device::exchange(const oa_device_options & options, const oa_host & host) {
    introduction mine = {};
    const size_t size = oa_device_area(call_.buffer);
    const auto   all  = together(net_, mine, "gather the devices", [&] {
        if (call_.n_ranks > OA_DEVICE_RANKS) {
            throw oa_comm_error("at most " + std::to_string(OA_DEVICE_RANKS) + " ranks of a host sum on devices, got " +
                                   std::to_string(call_.n_ranks));
        }
        device_                   = oa_open_device(options.name);
        call_.areas[shm_.index()] = device_->allocate(size, mine.handle);
        report_ = call_.report = static_cast<oa_device_report *>(device_->host_memory(sizeof(oa_device_report)));
        if (n_hosts_ > 1 && shm_.is_lm()) {
            sums_    = static_cast<char *>(device_->host_memory(call_.buffer));
            results_ = static_cast<char *>(device_->host_memory(call_.buffer));
        }
    });
    together(net_, mine, "open the devices", [&] {
        for (int i = 0; i < call_.n_ranks; ++i) {
            const oa_device_handle & theirs = all[size_t(host.ranks[size_t(i)])].handle;
            if (i != shm_.index()) {
                call_.areas[i] = device_->open(theirs, size);
            }
            for (int j = 0; j < i; ++j) {
                const oa_device_handle & other = all[size_t(host.ranks[size_t(j)])].handle;
                shared_ |= !options.eager && std::strcmp(theirs.place, other.place) == 0;
            }
        }
    });
}

oa_intra_host_device::~oa_intra_host_device() {
    if (!device_) {
        return;
    }
    // Memory must not be freed while others have it open.
    device_->close();
    shm_.count(OA_CLOSED, 1);
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(1);
    while (!shm_.reached(OA_CLOSED, 1) && !shm_.failed() && std::chrono::steady_clock::now() < until) {
        shm_.sleep(shm_.now());
    }
}

// Elements at a time: as many as a buffer takes of the pieces that travel between hosts.
size_t oa_intra_host_device::piece(const oa_operation & op) const {
    return call_.buffer / oa_dtype_size(oa_dtype(op.dtype)) / op.chunk * op.chunk;
}

void oa_intra_host_device::run(const oa_operation & op, void * buffer, oa_schedule * schedule, void * stream) {
    op_                    = &op;
    schedule_              = schedule;
    stream_                = stream;
    compared_              = false;
    total_                 = shm_.counted(OA_OUTPUT, shm_.index());
    call_.dtype            = oa_dtype(op.dtype);
    call_.tag              = uint64_t(op.tag());
    call_.n_slices         = op.slices ? call_.n_ranks : 1;
    const size_t at_a_time = piece(op);
    const size_t width     = oa_dtype_size(call_.dtype);
    shm_.announce(op);
    watch_.begin(op);
    try {
        // Of nothing there is a piece too: the ranks meet.
        for (size_t at = 0; at == 0 || at < op.n; at += at_a_time) {
            char * values = static_cast<char *>(buffer) + at * width;
            call_.n       = std::min<size_t>(at_a_time, op.n - at);
            ++call_.epoch;
            ++total_;
            start(OA_PUT, values, nullptr);
            count(OA_INPUT);
            if (n_hosts_ > 1) {
                between_hosts();
                settle(OA_TAKE, values, OA_RESULT);
            } else if (op.slices) {
                settle(OA_REDUCE, nullptr, OA_INPUT);
                count(OA_SUM);
                settle(OA_GATHER, values, OA_SUM);
            } else {
                settle(OA_ADD, values, OA_INPUT);
            }
            count(OA_OUTPUT);
        }
    } catch (...) {
        __atomic_store_n(&report_->abort, 1, __ATOMIC_RELAXED);
        throw;
    }
}

// Up to the result at the LM.
void oa_intra_host_device::between_hosts() {
    settle(OA_REDUCE, nullptr, OA_INPUT);
    count(OA_SUM);
    if (shm_.is_lm()) {
        settle(OA_GATHER, sums_, OA_SUM);
        wire();
        start(OA_GIVE, results_, nullptr);
        count(OA_RESULT);
    }
}

void oa_intra_host_device::wire() {
    const size_t width = oa_dtype_size(call_.dtype);
    const int    first = schedule_->n_finished();
    const int    last  = first + int(std::max<uint64_t>(1, (call_.n + op_->chunk - 1) / op_->chunk));
    while (schedule_->n_finished() < last) {
        bool moved = false;
        while (schedule_->n_opened() < std::min(last, schedule_->n_finished() + schedule_->depth())) {
            const size_t at = size_t(schedule_->n_opened() - first) * op_->chunk;
            schedule_->open(results_ + at * width, std::min<size_t>(op_->chunk, call_.n - at));
            schedule_->start(sums_ + at * width);
            moved = true;
        }
        if (schedule_->poll() || moved) {
            watch_.progress();
            continue;
        }
        watch_.look([](int) { return false; });
        net_.check_timeout(watch_.waited());
        sched_yield();
    }
}

void oa_intra_host_device::start(oa_device_step step, const void * from, void * to) {
    call_.step = step;
    call_.from = from;
    call_.to   = to;
    device_->launch(call_, stream_);
}

// A step that waits for flags, until it has found them and is done.
void oa_intra_host_device::settle(oa_device_step step, void * to, oa_shm_event awaited) {
    for (bool again = false;; again = true) {
        if (shared_ || again) {
            await(awaited);
        }
        report_->late = report_->aborted = report_->mismatch = 0;
        start(step, nullptr, to);
        finish();
        if (report_->mismatch) {
            await(OA_INPUT); // throws
            throw oa_comm_error("a rank's device is at another step of " + op_->print());
        }
        if (!report_->late && !report_->aborted) {
            watch_.progress();
            return;
        }
        watch_.look([](int) { return false; });
        if (watch_.waited() > timeout_) {
            throw oa_comm_error("another rank's device has not finished for " + std::to_string(int(watch_.waited())) +
                                " s in " + op_->print());
        }
    }
}

// Until all ranks have started what `event` stands for.
void oa_intra_host_device::await(oa_shm_event event) {
    while (true) {
        const uint32_t now = shm_.now();
        if (shm_.reached(event, total_)) {
            break;
        }
        const auto behind = [&](int index) {
            return shm_.counted(event, index) < total_ && (event != OA_RESULT || index == shm_.lm());
        };
        watch_.look(behind);
        shm_.sleep(now);
    }
    if (!compared_) {
        compare_operations();
        compared_ = true;
    }
}

// Until all that was started has ended. Never for long: no step waits for longer than its patience.
void oa_intra_host_device::finish() {
    while (device_->busy(stream_)) {
        watch_.look([](int) { return false; });
        sched_yield();
    }
}

void oa_intra_host_device::count(oa_shm_event event) {
    if (shared_ && event != OA_OUTPUT) {
        finish(); // others start what needs it when they hear of it
    }
    shm_.count(event, total_);
}

void oa_intra_host_device::compare_operations() const {
    for (int i = 0; i < shm_.n_ranks(); ++i) {
        const oa_operation theirs = shm_.announced(i, op_->number);
        if (!(theirs == *op_)) {
            throw oa_comm_error("the ranks of a host are not at the same operation: expected " + op_->print() +
                                ", got " + theirs.print());
        }
    }
}
