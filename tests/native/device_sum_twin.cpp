// The protocol of csrc/comm/device_sum.h with threads in place of GPUs: `device_sum_twin SCENARIO
// [PART]`, from test_device_sum.py. Every rank is a team of threads that runs the blocks of a step one after the other,
// as one block of a kernel; what the ranks share is ordinary memory. Ends with 1 and a line of text when a promise is
// broken.
//
// PART is a part of the protocol to leave out: proof that the scenarios (some under -fsanitize=thread) would notice.
#include "device_cpu.h"
#include "sum.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <iterator>
#include <memory>
#include <pthread.h>
#include <random>
#include <string>
#include <thread>
#include <unistd.h>
#include <vector>

#ifdef __SANITIZE_THREAD__
constexpr size_t large = 60007;
#else
constexpr size_t large = 1000003;
#endif

namespace {

constexpr uint64_t ms = 1000 * 1000;

enum part { nothing, release, acquire, sync_, abort_, clock_, buffers };
constexpr const char * parts[]  = { "", "release", "acquire", "sync", "abort", "clock", "buffers" };
part                   left_out = nothing; // set before there are threads

void require(bool condition, const std::string & what) {
    if (!condition) {
        std::printf("FAILED: %s\n", what.c_str());
        std::fflush(stdout);
        _exit(1);
    }
}

struct team {
    explicit team(int n) : votes(size_t(n), 1) { pthread_barrier_init(&barrier, nullptr, unsigned(n)); }
    ~team() { pthread_barrier_destroy(&barrier); }

    void meet() { pthread_barrier_wait(&barrier); }

    pthread_barrier_t barrier;
    std::vector<char> votes;
};

class team_block : public oa_cpu_block {
  public:
    team_block(team & team, int thread, int block, int n_blocks) :
        oa_cpu_block(block, n_blocks), team_(team), thread_(thread) {}

    int  thread() const { return thread_; }
    int  n_threads() const { return int(team_.votes.size()); }
    void sync() const {
        if (left_out != sync_) {
            team_.meet();
        }
    }
    bool all(bool mine) const {
        team_.votes[size_t(thread_)] = mine;
        team_.meet();
        bool every = true;
        for (const char vote : team_.votes) {
            every = every && vote;
        }
        team_.meet();
        return every;
    }

    static uint64_t load_acquire(const uint64_t * word) {
        return left_out == acquire ? __atomic_load_n(word, __ATOMIC_RELAXED) : oa_cpu_block::load_acquire(word);
    }
    static void store_release(uint64_t * word, uint64_t value) {
        left_out == release ? __atomic_store_n(word, value, __ATOMIC_RELAXED) :
                              oa_cpu_block::store_release(word, value);
    }
    static uint32_t load_host(const uint32_t * word) { return left_out == abort_ ? 0 : oa_cpu_block::load_host(word); }
    static uint64_t now() { return left_out == clock_ ? 0 : oa_cpu_block::now(); }

  private:
    team & team_;
    int    thread_;
};

struct area {
    explicit area(size_t buffer) : bytes(static_cast<char *>(std::aligned_alloc(256, oa_device_area(buffer)))) {
        std::memset(bytes, 0, oa_device_area(buffer));
    }
    ~area() { std::free(bytes); }
    char * bytes;
};

struct operation {
    oa_dtype dtype;
    size_t   n, offset; // offset: elements between a buffer's start and the values, which may lie off 16 bytes
    bool     sliced;
};

// What the ranks of a host share, and each rank's own.
struct host {
    host(int n_ranks, int n_threads, size_t buffer) : n_ranks(n_ranks), n_threads(n_threads), buffer(buffer) {
        for (int i = 0; i < n_ranks; ++i) {
            areas.push_back(std::make_unique<area>(buffer));
            teams.push_back(std::make_unique<team>(n_threads));
        }
        reports.resize(size_t(n_ranks));
    }

    oa_device_call call(int rank) {
        oa_device_call c = {};
        c.rank           = rank;
        c.n_ranks        = n_ranks;
        c.lm             = n_ranks - 1;
        c.buffer         = buffer;
        c.patience       = 1 * ms;
        c.report         = &reports[size_t(rank)];
        for (int i = 0; i < n_ranks; ++i) {
            c.areas[i] = areas[size_t(i)]->bytes;
        }
        return c;
    }

    int                                n_ranks, n_threads;
    size_t                             buffer;
    std::vector<std::unique_ptr<area>> areas;
    std::vector<std::unique_ptr<team>> teams;
    std::vector<oa_device_report>      reports;
};

// One thread of a rank.
class actor {
  public:
    actor(host & host, int rank, int thread, unsigned seed) :
        call(host.call(rank)), team_(*host.teams[size_t(rank)]), thread_(thread), random_(seed * 100 + unsigned(rank)) {
    }

    void launch(oa_device_step step, const void * from, void * to) {
        if (thread_ == 0 && random_() % 4 == 0) {
            usleep(random_() % 300);
        }
        team_.meet();
        call.step          = step;
        call.from          = from;
        call.to            = to;
        const int n_blocks = oa_device_blocks(call);
        for (int i = 0; i < n_blocks; ++i) {
            team_block block(team_, thread_, i, n_blocks);
            switch (call.dtype) {
                case OA_F32: oa_device_block<oa_f32_values, team_block>(block, call).run(); break;
                case OA_F16: oa_device_block<oa_f16_values, team_block>(block, call).run(); break;
                case OA_BF16: oa_device_block<oa_bf16_values, team_block>(block, call).run(); break;
            }
        }
        team_.meet();
    }

    // As the host does: again and again until the flags were there. False when they have not come in 20 s.
    bool settle(oa_device_step step, void * to) {
        for (int i = 0; i < 20000; ++i) {
            if (thread_ == 0) {
                call.report->late = 0;
            }
            launch(step, nullptr, to);
            require(!call.report->mismatch, "another operation's flag");
            const bool late = call.report->late;
            team_.meet();
            if (!late) {
                return true;
            }
        }
        return false;
    }

    // The sum of values at `buffer`, in pieces.
    void run(const operation & op, char * buffer, uint64_t number, bool through_lm) {
        const size_t width = oa_dtype_size(op.dtype), most = call.buffer / width;
        call.dtype    = op.dtype;
        call.tag      = number;
        call.n_slices = op.sliced || through_lm ? call.n_ranks : 1;
        for (size_t at = 0; at == 0 || at < op.n; at += most) {
            char * values = buffer + (op.offset + at) * width;
            call.n        = std::min(most, op.n - at);
            call.epoch += left_out == buffers ? 2 : 1;
            launch(OA_PUT, values, nullptr);
            bool done = true;
            if (call.n_slices == 1 && !through_lm) {
                done = settle(OA_ADD, values);
            } else {
                done = settle(OA_REDUCE, nullptr);
                if (!through_lm || call.rank == call.lm) {
                    done = done && settle(OA_GATHER, values);
                }
                if (through_lm && call.rank == call.lm) {
                    launch(OA_GIVE, values, nullptr);
                }
                done = done && (!through_lm || settle(OA_TAKE, values));
            }
            require(done, "flags that never come");
        }
    }

    oa_device_call call;

  private:
    team &       team_;
    const int    thread_;
    std::mt19937 random_;
};

std::vector<char> random_values(const operation & op, unsigned seed) {
    std::mt19937      random(seed);
    std::vector<char> bytes((op.offset + op.n) * oa_dtype_size(op.dtype) + 16);
    for (size_t i = 0; i < op.offset + op.n; ++i) {
        // Signs, magnitudes over many octaves, subnormals of all types, both zeros.
        const uint32_t bits = random();
        const float    f    = bits % 61 == 0 ? -0.0f :
                              bits % 53 == 0 ? oa_bits_f32(bits & 0x807fffff) :
                                               std::ldexp(float(int32_t(bits)) * 0x1p-31f, int(random() % 40) - 26);
        switch (op.dtype) {
            case OA_F32: reinterpret_cast<float *>(bytes.data())[i] = f; break;
            case OA_F16: reinterpret_cast<uint16_t *>(bytes.data())[i] = oa_f32_f16(f); break;
            case OA_BF16: reinterpret_cast<uint16_t *>(bytes.data())[i] = oa_f32_bf16(f); break;
        }
    }
    return bytes;
}

// Several operations in a row; the bits of all ranks against oa_sum().
void sums(int n_ranks, int n_threads, uint64_t epoch, const std::vector<operation> & operations, bool through_lm) {
    host                                        host(n_ranks, n_threads, 256 << 10);
    std::vector<std::vector<std::vector<char>>> buffers(operations.size()); // by operation and rank
    std::vector<std::vector<char>>              expected;
    for (size_t o = 0; o < operations.size(); ++o) {
        const operation &         op    = operations[o];
        const size_t              width = oa_dtype_size(op.dtype);
        std::vector<const void *> sources;
        for (int rank = 0; rank < n_ranks; ++rank) {
            buffers[o].push_back(random_values(op, unsigned(o * 100) + unsigned(rank)));
        }
        for (const auto & buffer : buffers[o]) {
            sources.push_back(buffer.data() + op.offset * width);
        }
        expected.emplace_back(op.n * width);
        oa_sum(op.dtype, expected.back().data(), sources.data(), n_ranks, op.n);
    }
    std::vector<std::thread> threads;
    for (int rank = 0; rank < n_ranks; ++rank) {
        for (int thread = 0; thread < n_threads; ++thread) {
            threads.emplace_back([&, rank, thread] {
                actor actor(host, rank, thread, unsigned(epoch));
                actor.call.epoch = epoch;
                for (size_t o = 0; o < operations.size(); ++o) {
                    actor.run(operations[o], buffers[o][size_t(rank)].data(), o, through_lm);
                }
            });
        }
    }
    for (std::thread & thread : threads) {
        thread.join();
    }
    for (size_t o = 0; o < operations.size(); ++o) {
        const operation & op    = operations[o];
        const size_t      start = op.offset * oa_dtype_size(op.dtype);
        for (int rank = 0; rank < n_ranks; ++rank) {
            require(std::memcmp(buffers[o][size_t(rank)].data() + start, expected[o].data(), expected[o].size()) == 0,
                    "bits of rank " + std::to_string(rank) + " of " + std::to_string(n_ranks) + ", operation " +
                        std::to_string(o));
        }
    }
}

void all_sums() {
    const uint64_t wrap = (uint64_t(1) << 32) - 4; // where counters of 32 bits would begin anew
    for (int n_ranks = 1; n_ranks <= 8; ++n_ranks) {
        std::vector<operation> operations;
        for (const oa_dtype dtype : { OA_F32, OA_F16, OA_BF16 }) {
            for (const size_t n : { size_t(0), size_t(1), size_t(3), size_t(1025), large }) {
                operations.push_back({ dtype, n, 0, false });
                operations.push_back({ dtype, n, n % 5, true });
            }
        }
        const int n_threads = 1 + n_ranks % 2;
        sums(n_ranks, n_threads, n_ranks % 3 == 0 ? 0 : wrap, operations, false);
        operations.resize(10);
        sums(n_ranks, n_threads, wrap, operations, true);
    }
}

// Small ones in quick succession, where ranks overtake each other.
void many_sums() {
    std::vector<operation> operations;
    for (size_t i = 0; i < 400; ++i) {
        operations.push_back({ oa_dtype(i % 3), 100 + i * 7, i % 4, i % 3 == 1 });
    }
    sums(3, 2, 0, operations, false);
    sums(2, 1, 0, operations, true);
}

// Ranks 0 and 1 of 3 have put in their values and wait for rank 2: what they report, and how long they took.
double wait_for_nobody(host & host, uint64_t patience, const std::function<void()> & meanwhile) {
    std::vector<std::thread> threads;
    const uint64_t           since = oa_cpu_block::now();
    for (int rank = 0; rank < 2; ++rank) {
        threads.emplace_back([&, rank] {
            std::vector<float> values(1000, float(rank));
            actor              actor(host, rank, 0, 0);
            actor.call.n_slices = 1;
            actor.call.n        = values.size();
            actor.call.epoch    = 1;
            actor.call.patience = patience;
            actor.launch(OA_PUT, values.data(), nullptr);
            actor.launch(OA_ADD, nullptr, values.data());
            require(values[0] == float(rank), "a sum without all ranks");
        });
    }
    meanwhile();
    for (std::thread & thread : threads) {
        thread.join();
    }
    return double(oa_cpu_block::now() - since) * 1e-9;
}

void aborted_rank() {
    host         host(3, 1, 64 << 10);
    const double seconds = wait_for_nobody(host, 5000 * ms, [&] {
        usleep(50000);
        for (oa_device_report & report : host.reports) {
            oa_cpu_block::store_host(&report.abort, 1);
        }
    });
    require(host.reports[0].aborted && host.reports[1].aborted, "an abort that was not seen");
    require(seconds < 2, "an abort that took " + std::to_string(seconds) + " s");
}

void missing_rank() {
    host         host(3, 1, 64 << 10);
    const double seconds = wait_for_nobody(host, 30 * ms, [] {});
    require(host.reports[0].late && host.reports[1].late, "a missing rank that nobody misses");
    require(seconds >= 0.03 && seconds < 2, "a wait of 30 ms that took " + std::to_string(seconds) + " s");
}

void other_operation() {
    host host(2, 1, 64 << 10);
    for (int rank = 0; rank < 2; ++rank) {
        float value = 1;
        actor actor(host, rank, 0, 0);
        actor.call.n_slices = 1;
        actor.call.n        = 1;
        actor.call.epoch    = 1;
        actor.call.tag      = uint64_t(rank);
        actor.launch(OA_PUT, &value, nullptr);
        actor.launch(OA_ADD, nullptr, &value);
        require(value == 1, "a sum of two operations");
    }
    require(host.reports[0].late && host.reports[1].mismatch, "another operation that was not noticed");
}

} // namespace

int main(int argc, char ** argv) {
    const std::string scenario = argc > 1 ? argv[1] : "";
    const std::string without  = argc > 2 ? argv[2] : "";
    left_out                   = part(std::find(std::begin(parts), std::end(parts), without) - std::begin(parts));
    if (scenario == "sums") {
        all_sums();
    } else if (scenario == "many") {
        many_sums();
    } else if (scenario == "abort") {
        aborted_rank();
    } else if (scenario == "missing") {
        missing_rank();
    } else if (scenario == "other") {
        other_operation();
    } else {
        std::printf("usage: device_sum_twin sums|many|abort|missing|other [PART]\n");
        return 2;
    }
    std::printf("ok\n");
    return 0;
}
