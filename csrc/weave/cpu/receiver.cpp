#include "receiver.h"

#include "clock.h"
#include "ggml-cpu.h"

#include <algorithm>
#include <cstring>

namespace oa::weave {

namespace {

constexpr double   rest_s         = 2e-3; // of an idle thread, and between two signs of life
constexpr uint32_t beats_per_look = 100;  // at whether the sender lives
constexpr int      n_spins        = 2000; // of an idle thread after a task: the next layer's is near
constexpr size_t   small_nbytes   = 4096; // of the payload of a task that is no attention

uint32_t next_of(uint64_t claim) {
    return uint32_t(claim);
}

uint32_t count_of(uint64_t claim) {
    return uint32_t(claim >> 32);
}

void make_room(std::vector<char> & memory, size_t nbytes) {
    if (memory.size() < nbytes) {
        memory.resize(nbytes);
    }
}

} // namespace

Receiver::Receiver(const std::string & path, const ReceiverOptions & options) :
    options_(options), region_(Region::create(path, options.n_slots, options.task_nbytes, options.result_nbytes)),
    ring_(region_, options.n_slots), store_(options.quota_nbytes), result_(small_nbytes) {
    ggml_cpu_init(); // its tables
    region_.store_release<uint64_t>(word::free_nbytes, store_.free_nbytes());
    drain(false);
    threads_.emplace_back([this] { beat(); });
    for (uint32_t i = 0; i < std::max(1u, options_.n_idle); ++i) {
        threads_.emplace_back([this] { idle(); });
    }
}

Receiver::~Receiver() {
    ended_.store(true);
    for (auto & thread : threads_) {
        thread.join();
    }
    region_.store_release<uint32_t>(word::state, uint32_t(State::ended));
}

void Receiver::drain(bool wanted) {
    const std::lock_guard<std::mutex> lock(state_mutex_);
    n_drains_.fetch_add(wanted && state_ != State::draining, std::memory_order_relaxed);
    state_ = wanted ? State::draining : State::ready;
    region_.store_release<uint32_t>(word::state, uint32_t(state_));
}

void Receiver::graph(bool begins) {
    n_graphs_.fetch_add(begins ? 1 : -1, std::memory_order_relaxed);
    if (!begins && options_.polls == Polls::graphs) {
        poll();
    }
}

ReceiverStats Receiver::stats() const {
    ReceiverStats stats;
    stats.n_tasks      = n_tasks_;
    stats.n_refused    = n_refused_;
    stats.n_items      = n_items_;
    stats.n_epochs     = n_epochs_;
    stats.n_looks      = n_looks_;
    stats.n_drains     = n_drains_;
    stats.quota_nbytes = store_.quota_nbytes();
    stats.free_nbytes  = store_.free_nbytes();
    stats.n_sequences  = store_.n_sequences();
    return stats;
}

void Receiver::poll() {
    do {
        work();
    } while (open_next());
}

void Receiver::work() {
    uint64_t claim = claim_.load(std::memory_order_acquire);
    while (next_of(claim) < count_of(claim)) {
        claim = claim_.fetch_add(1, std::memory_order_acq_rel);
        if (next_of(claim) >= count_of(claim)) {
            return;
        }
        job_.run(next_of(claim), reinterpret_cast<float *>(result_.data()));
        n_items_.fetch_add(1, std::memory_order_relaxed);
        if (left_.fetch_sub(1, std::memory_order_acq_rel) == 1) {
            finish(Status::ok, job_.result_nbytes());
            return;
        }
        claim = claim_.load(std::memory_order_acquire);
    }
}

// Whether there was something to do.
bool Receiver::open_next() {
    const bool wanted = region_.load_acquire<uint64_t>(word::epoch) != region_.load_acquire<uint64_t>(word::accepted) ||
                        waits(region_.load_acquire<uint32_t>(word::tail), region_.load_acquire<uint32_t>(word::done),
                              region_.header().n_slots);
    if (!wanted || taken_.exchange(true, std::memory_order_acquire)) {
        return false;
    }
    if (ring_.is_new_epoch()) {
        forget();
        n_epochs_.fetch_add(1, std::memory_order_relaxed);
        ring_.accept();
    } else if (ring_.has_task()) {
        open(ring_.slot(ring_.next()));
        return true;
    } else {
        ring_.restore();
    }
    taken_.store(false, std::memory_order_release);
    return true;
}

void Receiver::open(uint32_t slot) {
    TaskHeader * task = region_.task(slot);
    TaskHeader   header;
    memcpy(&header, task, sizeof(header));
    if (!ring_.is_next(header.epoch, header.number) || header.nbytes > region_.header().task_nbytes - line) {
        return finish(Status::malformed, 0);
    }
    make_room(task_, header.nbytes);
    memcpy(task_.data(), payload(task), header.nbytes);
    if (header.checksum != checksum(header, task_.data())) {
        return finish(Status::malformed, 0);
    }
    const size_t most = region_.header().result_nbytes - line;
    if (header.kind == Kind::attend || header.kind == Kind::append) {
        const Status status = job_.read(header.kind, task_.data(), header.nbytes, most, store_);
        if (status != Status::ok) {
            return finish(status, 0);
        }
        make_room(result_, job_.result_nbytes());
        left_.store(job_.n_items(), std::memory_order_relaxed);
        claim_.store(uint64_t(job_.n_items()) << 32, std::memory_order_release);
        return;
    }
    if (header.nbytes > std::min(small_nbytes, most)) {
        return finish(Status::malformed, 0);
    }
    OpenTask    wanted;
    ReserveTask change;
    switch (header.kind) {
        case Kind::ping:
            std::transform(task_.begin(), task_.begin() + header.nbytes, result_.begin(),
                           [](char byte) { return char(~byte); });
            return finish(Status::ok, header.nbytes);
        case Kind::open:
            if (header.nbytes == sizeof(wanted)) {
                memcpy(&wanted, task_.data(), sizeof(wanted));
                Handle       handle = {};
                const Status status = store_.open(wanted, handle);
                memcpy(result_.data(), &handle, sizeof(handle));
                return finish(status, status == Status::ok ? sizeof(handle) : 0);
            }
            break;
        case Kind::reserve:
        case Kind::trim:
            if (header.nbytes == sizeof(change)) {
                memcpy(&change, task_.data(), sizeof(change));
                const bool more = header.kind == Kind::reserve;
                return finish(more ? store_.reserve(change.handle, change.n_tokens) :
                                     store_.trim(change.handle, change.n_tokens),
                              0);
            }
            break;
        default: break;
    }
    finish(Status::malformed, 0);
}

// The first nbytes of result_ are the answer.
void Receiver::finish(Status status, size_t nbytes) {
    ResultHeader * result = region_.result(ring_.slot(ring_.next()));
    ResultHeader   header = {};
    header.epoch          = ring_.epoch();
    header.number         = ring_.next();
    header.status         = status;
    header.nbytes         = uint32_t(nbytes);
    header.checksum       = checksum(header, result_.data());
    memcpy(payload(result), result_.data(), nbytes);
    memcpy(result, &header, sizeof(header));
    region_.store_release<uint64_t>(word::free_nbytes, store_.free_nbytes());
    n_tasks_.fetch_add(1, std::memory_order_relaxed);
    n_refused_.fetch_add(status != Status::ok, std::memory_order_relaxed);
    ring_.finish();
    taken_.store(false, std::memory_order_release);
    __atomic_thread_fence(__ATOMIC_SEQ_CST); // with the sender's, which shows that it sleeps and then looks at `done`
    if (region_.load_acquire<uint32_t>(word::tx_sleeping)) {
        region_.wake(word::done);
    }
}

// A thread of the receiver: shows that the process runs and what it wants, whatever the other threads are doing.
void Receiver::beat() {
    for (uint32_t beat = 1; !ended_.load(std::memory_order_relaxed); ++beat) {
        {
            const std::lock_guard<std::mutex> lock(state_mutex_);
            region_.store_release<uint32_t>(word::state, uint32_t(state_));
        }
        region_.store_release<uint32_t>(word::heartbeat, beat);
        if (!taken_.exchange(true, std::memory_order_acquire)) {
            ring_.restore();
            if (beat % beats_per_look == 0 && store_.n_sequences() > 0 && !region_.other_lives()) {
                forget();
            }
            taken_.store(false, std::memory_order_release);
        }
        std::this_thread::sleep_for(std::chrono::duration<double>(rest_s));
    }
}

// All guests, of a sender that is gone.
void Receiver::forget() {
    store_.clear();
    region_.store_release<uint64_t>(word::free_nbytes, store_.free_nbytes());
}

// Threads of the receiver: poll while no graph is computed.
void Receiver::idle() {
    uint64_t seen = 0;
    while (!ended_.load(std::memory_order_relaxed)) {
        const uint32_t doorbell = region_.load_acquire<uint32_t>(word::doorbell);
        if (n_graphs_.load(std::memory_order_relaxed) == 0) {
            poll();
            if (const uint64_t n_tasks = n_tasks_.load(std::memory_order_relaxed); n_tasks != seen) {
                seen = n_tasks;
                for (int i = 0; i < n_spins && n_graphs_.load(std::memory_order_relaxed) == 0; ++i) {
                    oa_pause();
                    poll();
                }
                continue;
            }
        }
        region_.store_release<uint32_t>(word::rx_sleeping, 1);
        __atomic_thread_fence(__ATOMIC_SEQ_CST);
        region_.wait(word::doorbell, doorbell, rest_s);
        region_.store_release<uint32_t>(word::rx_sleeping, 0);
    }
}

} // namespace oa::weave
