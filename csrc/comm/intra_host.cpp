#include "intra_host.h"

#include "comm_error.h"
#include "futex.h"

#include <algorithm>
#include <cstring>
#include <sched.h>
#include <unistd.h>

// One cache line per writer, so that no rank's counting disturbs another's.
struct alignas(64) oa_shm_rank {
    std::atomic<uint64_t> counts[OA_N_EVENTS];
    std::atomic<uint64_t> beats;
    std::atomic<int32_t>  pid;
    alignas(64) oa_operation ops[2]; // with even and odd numbers
};

struct oa_shm_header {
    alignas(64) std::atomic<uint32_t> events;
    std::atomic<uint32_t> sleepers;
    alignas(64) std::atomic<uint32_t> failure; // none, being written, there
    int32_t culprit;
    char    what[1024];
};

static_assert(std::atomic<uint64_t>::is_always_lock_free, "counters are shared between processes");

namespace {

enum { NO_FAILURE, FAILING, FAILED };

size_t padded(size_t n) {
    return (n + 4095) / 4096 * 4096;
}

} // namespace

oa_intra_host::oa_intra_host(int index, int n_ranks, int lm, size_t area) :
    index_(index), n_ranks_(n_ranks), lm_(lm), area_(padded(area)) {}

size_t oa_intra_host::segment_size(int n_ranks, size_t area) {
    return padded(sizeof(oa_shm_header) + size_t(n_ranks) * sizeof(oa_shm_rank)) + size_t(n_ranks + 2) * padded(area);
}

void oa_intra_host::attached() {
    char * at = memory_.data();
    header_   = reinterpret_cast<oa_shm_header *>(at); // zeroed memory is a valid state of all of it
    ranks_    = reinterpret_cast<oa_shm_rank *>(at + sizeof(oa_shm_header));
    areas_    = at + padded(sizeof(oa_shm_header) + size_t(n_ranks_) * sizeof(oa_shm_rank));
    ranks_[index_].pid.store(getpid());
}

void oa_intra_host::announce(const oa_operation & op) {
    ranks_[index_].ops[op.number % 2] = op;
    slices_                           = op.slices != 0;
}

oa_operation oa_intra_host::announced(int index, uint64_t number) const {
    return ranks_[index].ops[number % 2];
}

bool oa_intra_host::takes_part(oa_shm_event event, int index) const {
    return index == lm_ || event == OA_INPUT || event == OA_OUTPUT || event == OA_CLOSED ||
           (event == OA_SUM && slices_);
}

uint64_t oa_intra_host::counted(oa_shm_event event, int index) const {
    return ranks_[index].counts[event].load();
}

void oa_intra_host::count(oa_shm_event event, uint64_t total) {
    ranks_[index_].counts[event].store(total);
    // Sequentially consistent stores and loads: of several last ranks at least one sees all the others.
    if (reached(event, total)) {
        header_->events.fetch_add(1);
        if (header_->sleepers.load() > 0) {
            oa_futex_wake(header_->events);
        }
    }
}

bool oa_intra_host::reached(oa_shm_event event, uint64_t total) {
    if (seen_[event] >= total) {
        return true;
    }
    uint64_t least = UINT64_MAX;
    for (int i = 0; i < n_ranks_; ++i) {
        if (takes_part(event, i)) {
            least = std::min(least, counted(event, i));
        }
    }
    seen_[event] = least;
    return least >= total;
}

uint32_t oa_intra_host::now() const {
    return header_->events.load();
}

void oa_intra_host::sleep(uint32_t seen) {
    // Looking again pays only when the others run meanwhile, on cores of their own: doubled when it helped, halved when
    // it did not. Yielding in between lets them run where they do not.
    constexpr int most = 64;
    for (int i = 0; i < spin_; ++i) {
        if (now() != seen) {
            spin_ = std::min(2 * spin_, most);
            return;
        }
        sched_yield();
    }
    spin_ = std::max(spin_ / 2, 1);
    header_->sleepers.fetch_add(1);
    oa_futex_wait(header_->events, seen, 0.02);
    header_->sleepers.fetch_sub(1);
}

void oa_intra_host::beat() {
    ranks_[index_].beats.fetch_add(1, std::memory_order_relaxed);
}

uint64_t oa_intra_host::beats(int index) const {
    uint64_t sum = ranks_[index].beats.load(std::memory_order_relaxed);
    for (const auto & count : ranks_[index].counts) {
        sum += count.load(std::memory_order_relaxed);
    }
    return sum;
}

int oa_intra_host::pid(int index) const {
    return ranks_[index].pid.load();
}

void oa_intra_host::fail(const std::string & what, int rank) {
    uint32_t none = NO_FAILURE;
    if (header_->failure.compare_exchange_strong(none, FAILING)) {
        header_->culprit = rank;
        std::strncpy(header_->what, what.c_str(), sizeof(header_->what) - 1);
        header_->failure.store(FAILED);
        header_->events.fetch_add(1);
        oa_futex_wake(header_->events);
    }
}

bool oa_intra_host::failed() const {
    return header_->failure.load(std::memory_order_acquire) == FAILED;
}

void oa_intra_host::throw_failure() const {
    if (failed()) {
        throw oa_comm_error(header_->what, header_->culprit);
    }
}
