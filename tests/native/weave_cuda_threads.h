// CPU threads for the blocks of csrc/weave/cuda's kernels (block.h): for weave_cuda_twin.cpp and weave_cuda_fake.cpp.
//
// The blocks of a launch are threads, of which only some begin at once, in any order, and which let others run in
// between at random. leave_out() names something to leave out: proof that the tests would notice.
#pragma once

#include "receive.h"
#include "send.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <pthread.h>
#include <random>
#include <sched.h>
#include <string>
#include <thread>
#include <unistd.h>
#include <utility>
#include <vector>

namespace oa::weave::cuda {

struct TwinRules {
    static inline bool generation = true, room = true, epoch = true, says = true, closes = true;
};

// Orders of memory.
inline bool arrive_orders = true, arrive_system_orders = true, words_order = true;

// "": nothing. False: there is nothing of that name.
inline bool leave_out(const std::string & name) {
    const std::pair<const char *, bool *> all[] = {
        { "generation", &TwinRules::generation },
        { "room", &TwinRules::room },
        { "epoch", &TwinRules::epoch },
        { "says", &TwinRules::says },
        { "closes", &TwinRules::closes },
        { "arrive", &arrive_orders },
        { "arrive_system", &arrive_system_orders },
        { "words", &words_order },
    };
    for (const auto & [known, there] : all) {
        *there = name != known;
    }
    return name.empty() ||
           std::any_of(std::begin(all), std::end(all), [&](const auto & one) { return name == one.first; });
}

[[noreturn]] inline void give_up(const char * what) {
    printf("FAILED: %s\n", what);
    fflush(stdout);
    _exit(1);
}

// Of what belongs to the tests only: it must not order memory for the kernels, or the sanitizer sees no race.
#ifdef __SANITIZE_THREAD__
constexpr auto no_order = std::memory_order_relaxed;
#else
constexpr auto no_order = std::memory_order_seq_cst;
#endif

// 32 threads that exchange what they have.
struct Warp {
    static constexpr int n_lanes = 32, n_words = 6;

    Warp() { pthread_barrier_init(&barrier, nullptr, n_lanes); }
    ~Warp() { pthread_barrier_destroy(&barrier); }
    Warp(const Warp &) = delete;

    pthread_barrier_t barrier;
    uint32_t          words[n_lanes][n_words];
    const char *      rows[n_lanes];
};

template <class Memory> struct Team {
    explicit Team(int n) : n(n), warps(size_t(n / Warp::n_lanes)) {
        pthread_barrier_init(&barrier, nullptr, unsigned(n));
    }
    ~Team() { pthread_barrier_destroy(&barrier); }
    Team(const Team &) = delete;

    int               n;
    pthread_barrier_t barrier;
    std::vector<Warp> warps;
    Memory            memory;
};

template <class Memory> class TwinBlock {
  public:
    TwinBlock(Team<Memory> & team, int thread, int block, int n_blocks, unsigned seed) :
        team_(team), thread_(thread), block_(block), n_blocks_(n_blocks), random_(seed) {}

    int block() const { return block_; }
    int n_blocks() const { return n_blocks_; }
    int thread() const { return thread_; }
    int n_threads() const { return team_.n; }

    void sync() {
        if (team_.n > 1) {
            pthread_barrier_wait(&team_.barrier);
        }
    }

    Memory & shared() { return team_.memory; }

    template <int D> static constexpr int lanes() { return 1; }
    template <int D> static float         sum(float x) { return x; }

    // Arrives as late as it may; until then there is nothing that could be mistaken for it.
    template <int nbytes> void fetch(void * to, const void * from) {
        memset(to, 0xff, nbytes);
        fetches_.back().push_back({ to, from, nbytes });
    }

    void end_fetch() { fetches_.emplace_back(); }

    template <int n> void await_fetched() {
        for (; fetches_.size() > n + 1; fetches_.pop_front()) {
            for (const auto & [to, from, nbytes] : fetches_.front()) {
                memcpy(to, from, size_t(nbytes));
            }
        }
    }

    // Fragments as the PTX manual has them.
    bool has_tiles() const { return team_.n % Warp::n_lanes == 0; }

    void sync_warp() { pthread_barrier_wait(&warp().barrier); }

    float across(float x, int distance) {
        uint32_t word;
        memcpy(&word, &x, sizeof(word));
        exchange(&word, 1, nullptr, [&](const Warp & w) { memcpy(&x, &w.words[lane() ^ distance][0], sizeof(x)); });
        return x;
    }

    void load_tiles(uint32_t (&r)[4], const char * row) {
        exchange(nullptr, 0, row, [&](const Warp & w) {
            for (int i = 0; i < 4; ++i) {
                memcpy(&r[i], w.rows[i * 8 + lane() / 4] + lane() % 4 * 4, 4);
            }
        });
    }

    void load_tiles_turned(uint32_t (&r)[4], const char * row) {
        exchange(nullptr, 0, row, [&](const Warp & w) {
            for (int i = 0; i < 4; ++i) {
                uint16_t two[2];
                for (int j = 0; j < 2; ++j) {
                    memcpy(&two[j], w.rows[i * 8 + lane() % 4 * 2 + j] + lane() / 4 * 2, 2);
                }
                memcpy(&r[i], two, 4);
            }
        });
    }

    uint32_t turn(uint32_t x) {
        uint16_t two[2];
        exchange(&x, 1, nullptr, [&](const Warp & w) {
            for (int j = 0; j < 2; ++j) {
                two[j] = half(w.words[(lane() % 4 * 2 + j) * 4 + lane() / 4 / 2][0], lane() / 4 % 2);
            }
        });
        memcpy(&x, two, sizeof(x));
        return x;
    }

    void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
        const uint32_t words[Warp::n_words] = { a[0], a[1], a[2], a[3], b0, b1 };
        exchange(words, Warp::n_words, nullptr, [&](const Warp & w) {
            for (int i = 0; i < 4; ++i) {
                const int row = lane() / 4, column = lane() % 4 * 2 + i % 2;
                for (int k = 0; k < 16; ++k) {
                    const int      of_k = k % 8 / 2;
                    const uint32_t in_a = w.words[row * 4 + of_k][i / 2 + k / 8 * 2];
                    const uint32_t in_b = w.words[column * 4 + of_k][4 + k / 8];
                    c[i] += widen_f16(half(in_a, k % 2)) * widen_f16(half(in_b, k % 2));
                }
            }
        });
    }

    uint32_t claim(uint32_t * word) { return add(word, 1, false); }
    uint32_t arrive(uint32_t * word) { return add(word, 1, arrive_orders); }
    uint32_t arrive_system(uint32_t * word, uint32_t n) { return add(word, n, arrive_system_orders); }

    template <class T> static T    load_acquire(const T * word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }
    template <class T> static T    load(const T * word) { return __atomic_load_n(word, __ATOMIC_RELAXED); }
    template <class T> static void store_release(T * word, T value) {
        words_order ? __atomic_store_n(word, value, __ATOMIC_RELEASE) : __atomic_store_n(word, value, __ATOMIC_RELAXED);
    }

    static float exp(float x) { return std::exp(x); }
    static float tanh(float x) { return std::tanh(x); }

    static uint64_t now() {
        const auto since_start = std::chrono::steady_clock::now().time_since_epoch();
        return uint64_t(std::chrono::duration_cast<std::chrono::nanoseconds>(since_start).count());
    }
    static void pause() { sched_yield(); }

  private:
    int    lane() const { return thread_ % Warp::n_lanes; }
    Warp & warp() { return team_.warps[size_t(thread_ / Warp::n_lanes)]; }

    static uint16_t half(uint32_t word, int at) { return uint16_t(word >> (16 * at)); }

    // use(what all lanes of the warp have).
    template <class Use> void exchange(const uint32_t * words, int n, const char * row, Use && use) {
        std::copy_n(words, n, warp().words[lane()]);
        warp().rows[lane()] = row;
        sync_warp();
        use(warp());
        sync_warp();
    }

    uint32_t add(uint32_t * word, uint32_t n, bool ordered) {
        sync();
        jitter();
        if (thread_ == 0) {
            team_.memory.claimed =
                ordered ? __atomic_fetch_add(word, n, __ATOMIC_ACQ_REL) : __atomic_fetch_add(word, n, __ATOMIC_RELAXED);
        }
        sync();
        const uint32_t before = team_.memory.claimed;
        jitter();
        return before;
    }

    void jitter() {
        for (unsigned i = random_() % 4; i > 2; --i) {
            sched_yield();
        }
    }

    struct Fetch {
        void *       to;
        const void * from;
        int          nbytes;
    };

    Team<Memory> &                 team_;
    const int                      thread_, block_, n_blocks_;
    std::minstd_rand               random_;
    std::deque<std::vector<Fetch>> fetches_{ 1 }; // groups; the last one is open
};

// Runs a grid: blocks in random order, `n_resident` of them at a time.
template <class Memory, class Kernel>
void launch(int n_blocks, int n_resident, int n_threads, unsigned seed, Kernel && kernel) {
    std::vector<int> order;
    for (int i = 0; i < n_blocks; ++i) {
        order.push_back(i);
    }
    std::minstd_rand random(seed);
    std::shuffle(order.begin(), order.end(), random);
    n_resident = std::min(n_resident, n_blocks);
    std::atomic<int>                           next{ n_resident };
    std::vector<std::unique_ptr<Team<Memory>>> teams;
    std::vector<std::atomic<int>>              blocks(static_cast<size_t>(n_resident));
    std::vector<std::thread>                   threads;
    for (int i = 0; i < n_resident; ++i) {
        teams.push_back(std::make_unique<Team<Memory>>(n_threads));
        blocks[size_t(i)] = i;
    }
    for (int i = 0; i < n_resident; ++i) {
        for (int thread = 0; thread < n_threads; ++thread) {
            threads.emplace_back([&, i, thread] {
                auto & team = *teams[size_t(i)];
                while (true) {
                    if (n_threads > 1) {
                        pthread_barrier_wait(&team.barrier);
                    }
                    const int at = blocks[size_t(i)];
                    if (at >= n_blocks) {
                        break;
                    }
                    const int         block = order[size_t(at)];
                    TwinBlock<Memory> view(team, thread, block, n_blocks, seed + unsigned(block) * 7919u);
                    kernel(view);
                    if (n_threads > 1) {
                        pthread_barrier_wait(&team.barrier);
                    }
                    if (thread == 0) {
                        blocks[size_t(i)] = next.fetch_add(1, no_order);
                    }
                }
            });
        }
    }
    for (std::thread & thread : threads) {
        thread.join();
    }
}

} // namespace oa::weave::cuda
