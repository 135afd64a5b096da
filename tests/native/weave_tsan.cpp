// Both sides of a channel (csrc/weave) in one process under ThreadSanitizer: is there a race?
//
// ThreadSanitizer goes by addresses, so the region has one address for both sides: mmap is wrapped. It knows nothing of
// standalone fences: those of the channel order a store before a load of another word, for the sake of sleeping, and
// make nothing visible that is read without an acquire.
//
// weave_tsan PATH ROUNDS [tail|done|taken|claim|left release|acquire]: with the last two, that side of all accesses to
// the word is left out, which has to be found. For epoch and accepted it would not be, as who sees them has seen
// `done`, too: tests/native/weave_model.cpp tries those. Prints what was done as JSON; the exit code is
// ThreadSanitizer's.
#include "ggml-cpu.h"
#include "ggml.h"
#include "receiver.h"
#include "receiver_of_process.h"
#include "sender.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <random>
#include <string>
#include <sys/mman.h>
#include <sys/stat.h>
#include <thread>
#include <vector>

using namespace oa::weave;

namespace {

struct {
    char *     data   = nullptr;
    size_t     nbytes = 0;
    int        n_maps = 0;
    std::mutex mutex;
} region;

enum class Order { release, acquire };

std::string weak_word; // none: no access is weaker than it is written
Order       weak_order;

bool in_region(const volatile void * at) {
    const auto * byte = static_cast<const volatile char *>(at);
    return region.data && byte >= region.data && byte < region.data + region.nbytes;
}

// What is accessed, by its place in the region, or by its size: the receiver has one atomic of each size where it does
// more than count.
bool is_weak(const volatile void * at, const char * outside, Order order) {
    if (weak_word.empty() || order != weak_order) {
        return false;
    }
    if (!in_region(at)) {
        return weak_word == outside;
    }
    const size_t offset = size_t(static_cast<const volatile char *>(at) - region.data);
    return (weak_word == "tail" && offset == word::tail) || (weak_word == "done" && offset == word::done);
}

int weaker(const volatile void * at, const char * outside, int order) {
    const bool releases      = order == __ATOMIC_RELEASE || order == __ATOMIC_ACQ_REL;
    const bool acquires      = order == __ATOMIC_ACQUIRE || order == __ATOMIC_ACQ_REL;
    const bool keeps_release = releases && !is_weak(at, outside, Order::release);
    const bool keeps_acquire = acquires && !is_weak(at, outside, Order::acquire);
    if (keeps_release == releases && keeps_acquire == acquires) {
        return order;
    }
    return keeps_release ? __ATOMIC_RELEASE : keeps_acquire ? __ATOMIC_ACQUIRE : __ATOMIC_RELAXED;
}

} // namespace

extern "C" {

void * __real_mmap(void * hint, size_t nbytes, int protection, int flags, int file, off_t offset);
int    __real_munmap(void * data, size_t nbytes);

void * __wrap_mmap(void * hint, size_t nbytes, int protection, int flags, int file, off_t offset) {
    if (!(flags & MAP_SHARED)) {
        return __real_mmap(hint, nbytes, protection, flags, file, offset);
    }
    const std::lock_guard<std::mutex> lock(region.mutex);
    if (region.n_maps++ == 0) {
        region.data   = static_cast<char *>(__real_mmap(hint, nbytes, protection, flags, file, offset));
        region.nbytes = nbytes;
    }
    return region.data;
}

int __wrap_munmap(void * data, size_t nbytes) {
    const std::lock_guard<std::mutex> lock(region.mutex);
    if (data != region.data) {
        return __real_munmap(data, nbytes);
    }
    return --region.n_maps == 0 ? __real_munmap(data, nbytes) : 0;
}

#define STORE(bits, outside)                                                                                           \
    void __real___tsan_atomic##bits##_store(volatile uint##bits##_t * at, uint##bits##_t value, int order);            \
    void __wrap___tsan_atomic##bits##_store(volatile uint##bits##_t * at, uint##bits##_t value, int order) {           \
        __real___tsan_atomic##bits##_store(at, value, weaker(at, outside, order));                                     \
    }
#define LOAD(bits, outside)                                                                                            \
    uint##bits##_t __real___tsan_atomic##bits##_load(const volatile uint##bits##_t * at, int order);                   \
    uint##bits##_t __wrap___tsan_atomic##bits##_load(const volatile uint##bits##_t * at, int order) {                  \
        return __real___tsan_atomic##bits##_load(at, weaker(at, outside, order));                                      \
    }
#define CHANGE(bits, name, outside)                                                                                    \
    uint##bits##_t __real___tsan_atomic##bits##_##name(volatile uint##bits##_t * at, uint##bits##_t value, int order); \
    uint##bits##_t __wrap___tsan_atomic##bits##_##name(volatile uint##bits##_t * at, uint##bits##_t value,             \
                                                       int order) {                                                    \
        return __real___tsan_atomic##bits##_##name(at, value, weaker(at, outside, order));                             \
    }
STORE(8, "taken")
CHANGE(8, exchange, "taken")
STORE(32, "")
LOAD(32, "")
CHANGE(32, fetch_sub, "left")
STORE(64, "claim")
LOAD(64, "claim")
CHANGE(64, fetch_add, "claim")

} // extern "C"

namespace {

constexpr uint32_t n_layers = 2, n_head = 4, n_head_kv = 2, d = 32, n_sequences = 3, most_rows = 100;

// Graphs of two threads, which poll at every operator and inside of the multiplications.
void compute_graphs(const std::atomic<bool> & ended) {
    while (!ended) {
        ggml_context * ctx = ggml_init({ size_t(1) << 20, nullptr, false });
        ggml_tensor *  a   = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, 64, 64);
        ggml_tensor *  b   = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, 64, 8);
        memset(a->data, 0, ggml_nbytes(a));
        memset(b->data, 0, ggml_nbytes(b));
        ggml_tensor * c = b;
        for (int i = 0; i < 8; ++i) {
            c = ggml_mul_mat(ctx, a, c);
        }
        ggml_cgraph * graph = ggml_new_graph(ctx);
        ggml_build_forward_expand(graph, c);
        ggml_graph_compute_with_ctx(ctx, graph, 2);
        ggml_free(ctx);
    }
}

struct Guest {
    Handle   handle;
    uint32_t n_tokens = 0;
};

// Rows of some of the guests, in both layers.
bool attend(Sender & sender, std::vector<Guest> & guests, std::minstd_rand & random) {
    std::vector<SequenceRows> rows;
    uint32_t                  n_rows = 0;
    const uint32_t            most   = random() % 4 == 0 ? most_rows : 1;
    for (Guest & guest : guests) {
        if (random() % 4 != 0) {
            const uint32_t n = 1 + random() % most;
            rows.push_back({ guest.handle, guest.n_tokens, n });
            n_rows += n;
            guest.n_tokens += n;
            if (sender.reserve(guest.handle, guest.n_tokens) != Status::ok) {
                return false;
            }
        }
    }
    if (rows.empty()) {
        return true;
    }
    const bool               appends = random() % 3 == 0;
    const std::vector<float> q(n_rows * n_head * d, 0.5f), kv(n_rows * n_head_kv * d, 0.5f);
    std::vector<float>       out(q.size());
    for (uint32_t layer = 0; layer < n_layers; ++layer) {
        Attention wanted = {};
        wanted.task      = { layer, n_rows, uint32_t(rows.size()), n_head, n_head_kv, d, d, 0.1f, 0.0f,
                             0.0f,  0,      n_rows >= 64,          1,      0 };
        wanted.rows      = rows.data();
        wanted.q         = q.data();
        wanted.k = wanted.v = kv.data();
        wanted.q_stride     = n_head * d;
        wanted.k_stride = wanted.v_stride = n_head_kv * d;
        wanted.out                        = out.data();
        if (appends) {
            wanted.task.n_head = wanted.task.tiled = 0;
        }
        if (!sender.send(wanted) || (!appends && !sender.receive())) {
            return false;
        }
    }
    return true;
}

// One sender, from its epoch to its end. False: the receiver has failed.
bool send(const std::string & path, std::minstd_rand & random) {
    Sender             sender(path, { 60.0, 60.0, 0xfffffff0u + uint32_t(random() % 32) });
    std::vector<Guest> guests(n_sequences);
    for (Guest & guest : guests) {
        if (sender.open({ n_layers, 4096, GGML_TYPE_F16, GGML_TYPE_F16, n_head_kv * d, n_head_kv * d }, guest.handle) !=
            Status::ok) {
            return false;
        }
    }
    for (int i = 0; i < 20; ++i) {
        Guest & one = guests[random() % n_sequences];
        if (random() % 4 == 0 && one.n_tokens > 1) {
            one.n_tokens /= 2;
            if (sender.trim(one.handle, one.n_tokens) != Status::ok) {
                return false;
            }
        }
        if (!attend(sender, guests, random) || !sender.lives() || sender.free_nbytes() == 0) {
            return false;
        }
    }
    return true;
}

} // namespace

int main(int n_arguments, char ** arguments) {
    if (n_arguments != 3 && n_arguments != 5) {
        fprintf(stderr, "usage: weave_tsan PATH ROUNDS [tail|done|taken|claim|left release|acquire]\n");
        return 2;
    }
    if (n_arguments == 5) {
        weak_word  = arguments[3];
        weak_order = strcmp(arguments[4], "release") == 0 ? Order::release : Order::acquire;
    }
    ReceiverOptions options;
    options.task_nbytes        = 64 << 10; // large batches are cut
    options.result_nbytes      = 64 << 10;
    options.n_idle             = 2;
    options.part               = 1 << 12;
    const std::string path     = arguments[1];
    auto              receiver = std::make_shared<Receiver>(path, options);
    set_receiver(receiver);

    std::atomic<bool>        ended{ false };
    std::vector<std::thread> threads;
    threads.emplace_back([&] { compute_graphs(ended); });
    for (int i = 0; i < 2; ++i) {
        threads.emplace_back([&] {
            while (!ended) {
                receiver->poll();
            }
        });
    }
    threads.emplace_back([&] {
        for (bool wanted = true; !ended; wanted = !wanted) {
            receiver->drain(wanted);
            receiver->stats();
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
    });
    std::minstd_rand random(7);
    const int        n_rounds = atoi(arguments[2]);
    int              n_done   = 0;
    while (n_done < n_rounds && send(path, random)) {
        ++n_done;
    }
    ended = true;
    for (auto & thread : threads) {
        thread.join();
    }
    set_receiver(nullptr);
    const ReceiverStats stats = receiver->stats();
    printf("{\"epochs\": %llu, \"tasks\": %llu, \"refused\": %llu, \"items\": %llu}\n",
           (unsigned long long) stats.n_epochs, (unsigned long long) stats.n_tasks,
           (unsigned long long) stats.n_refused, (unsigned long long) stats.n_items);
    return n_done == n_rounds ? 0 : 1;
}
