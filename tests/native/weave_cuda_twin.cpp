// The kernels of csrc/weave/cuda with CPU threads for blocks, from test_weave_cuda_twin.py: as a shared object that
// Python drives, and as a program, `weave_cuda_twin [WITHOUT]`, for the thread sanitizer.
//
// A receiver's launches follow each other in one thread, a sender's in another, as on two streams.
#include "attention.h"
#include "block_store.h"
#include "control.h"
#include "region.h"
#include "weave_cuda_threads.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <sys/mman.h>
#include <sys/stat.h>
#include <thread>
#include <unistd.h>
#include <vector>

using namespace oa::weave;
using namespace oa::weave::cuda;

namespace {

struct Free {
    void operator()(char * memory) const { free(memory); }
};

using Bytes = std::unique_ptr<char, Free>;

Bytes zeros(size_t nbytes) {
    const size_t whole = (nbytes + 255) / 256 * 256;
    Bytes        made(static_cast<char *>(aligned_alloc(256, whole)));
    memset(made.get(), 0, whole);
    return made;
}

} // namespace

// Same as the ctypes.Structure in test_weave_cuda_twin.py.
struct TwinOptions {
    uint32_t n_blocks, n_resident, n_threads, seed;
    uint32_t base, n_slots, task_nbytes, result_nbytes;
    uint32_t pages_per_place, max_partials;
    uint64_t pool_nbytes;
};

// A receiver and a sender with a channel between them.
class Twin {
  public:
    explicit Twin(const TwinOptions & options) :
        o_(options), pool_(zeros(options.pool_nbytes)),
        pages_(zeros(size_t(max_places) * options.pages_per_place * sizeof(uint32_t))),
        partials_(zeros((options.max_partials + 1) * partial_floats * sizeof(float))),
        merges_(zeros((options.max_partials + 1) * sizeof(uint32_t))),
        inbox_(zeros(first_slot + size_t(options.n_slots) * options.task_nbytes)),
        outbox_(zeros(first_slot + size_t(options.n_slots) * options.result_nbytes)),
        state_(zeros(sizeof(ReceiverState))), sender_(zeros(sizeof(SenderState))),
        store_(options.pool_nbytes, options.pages_per_place,
               { [this](uint32_t place, const Place & now) {
                    write(&receiver().places[place].generation, now.generation);
                    write(&receiver().places[place].n_tokens, now.n_tokens);
                },
                 [this](uint32_t place, uint32_t first, const uint32_t * pages, uint32_t n) {
                     for (uint32_t i = 0; i < n; ++i) {
                         write(receiver().pages + place * o_.pages_per_place + first + i, pages[i]);
                     }
                 } }) {
        receiver().pool            = pool_.get();
        receiver().pages           = reinterpret_cast<uint32_t *>(pages_.get());
        receiver().partials        = reinterpret_cast<float *>(partials_.get());
        receiver().merges          = reinterpret_cast<uint32_t *>(merges_.get());
        receiver().adopted         = &adopted_;
        receiver().pages_per_place = o_.pages_per_place;
        receiver().max_partials    = o_.max_partials;
        polls_                     = std::thread([this] { poll(); });
    }

    ~Twin() {
        ended_ = true;
        polls_.join();
    }

    // A new sender, whose sequences are all of `shape`. As in sender_cuda.cpp and receiver_cuda.cpp.
    Failure attach(uint64_t epoch, const OpenTask & shape) {
        store_.clear();
        Handle handle = {};
        store_.open(shape, handle); // the shape is known from here on
        store_.trim(handle, 0);
        Setup setup              = {};
        setup.epoch              = epoch;
        setup.inbox              = inbox_.get();
        setup.outbox             = outbox_.get();
        setup.task_nbytes        = o_.task_nbytes;
        setup.result_nbytes      = o_.result_nbytes;
        setup.shape              = shape;
        setup.n_slots            = o_.n_slots;
        setup.n_pool_blocks      = store_.n_blocks();
        const uint32_t n         = ++n_setups_;
        receiver().setups[n % 2] = setup;
        __atomic_store_n(&receiver().setup_number.value, n, __ATOMIC_RELEASE);
        while (__atomic_load_n(&adopted_, __ATOMIC_ACQUIRE) != n) {
            sched_yield();
        }
        memset(sender_.get(), 0, sizeof(SenderState));
        report_                = {};
        sender().inbox         = inbox_.get();
        sender().outbox        = outbox_.get();
        sender().task_nbytes   = o_.task_nbytes;
        sender().result_nbytes = o_.result_nbytes;
        sender().patience      = 120ull * 1000 * 1000 * 1000;
        sender().epoch         = epoch;
        sender().report        = &report_;
        sender().n_slots       = o_.n_slots;
        sender().base          = o_.base;
        run(1, [](auto & send) { send.attach(); });
        run(1, [](auto & send) { send.await_accepted(); });
        run(1, [](auto & send) { send.ping(); });
        run(1, [](auto & send) { send.await_result(send.ping_answer()); });
        run(1, [](auto & send) { send.check_ping(); });
        return failure();
    }

    // Rows in tasks of at most `most` rows; results as they come, when no slot is left.
    Failure attend(const AttendTask & task, const SequenceRows * rows, const float * sinks, const float * q,
                   const float * k, const float * v, float * out, uint32_t most) {
        SendPlan & plan  = sender().plan;
        plan.n_sequences = task.n_sequences;
        for (uint32_t i = 0, first = 0; i < task.n_sequences; first += rows[i++].n_rows) {
            plan.rows[i]      = rows[i];
            plan.first_row[i] = first;
        }
        std::vector<FetchCall> sent;
        size_t                 fetched = 0;
        const auto             fetch   = [&] {
            const FetchCall call = sent[fetched++];
            run(1, [&](auto & send) { send.await_result(call.n_floats * uint32_t(sizeof(float))); });
            run(2, [&](auto & send) { send.fetch(call); });
        };
        const size_t per_out = size_t(task.n_head) * task.d_v;
        for (uint32_t first = 0; first < task.n_rows; first += most) {
            if (sent.size() - fetched == o_.n_slots) {
                fetch();
            }
            SendCall call    = {};
            call.task        = task;
            call.task.n_rows = std::min(most, task.n_rows - first);
            call.sinks       = sinks;
            call.q           = q;
            call.k           = k;
            call.v           = v;
            call.q_stride    = size_t(task.n_head) * task.d_k;
            call.k_stride    = size_t(task.n_head_kv) * task.d_k;
            call.v_stride    = size_t(task.n_head_kv) * task.d_v;
            call.first       = first;
            run(3, [&](auto & send) { send.send(call); });
            sent.push_back({ out + first * per_out, uint32_t(call.task.n_rows * per_out) });
        }
        while (fetched < sent.size()) {
            fetch();
        }
        return failure();
    }

    // What the next task says that it is of.
    void set_epoch(uint64_t epoch) { sender().epoch = epoch; }

    // Fill the store with what was never a token, as memory that others have had.
    void scribble() { memset(pool_.get(), 0x7f, o_.pool_nbytes); }

    // Puts tokens of a sequence, of one layer and one head in f16, where items find them.
    void keep(uint32_t place, uint32_t first, uint32_t n, uint32_t width, const float * k, const float * v) {
        for (uint32_t i = 0; i < n; ++i, k += width, v += width) {
            const uint32_t token = first + i;
            const uint32_t page  = receiver().pages[place * o_.pages_per_place + token / block_tokens];
            char *         of_k  = pool_.get() + page * block_tokens * kv_token_nbytes(kv_f16, width) * 2;
            char *         of_v  = of_k + block_tokens * kv_token_nbytes(kv_f16, width);
            for (uint32_t at = 0; at < width / F16::unit; ++at) {
                F16::store(of_k, token % block_tokens, width, at, k);
                F16::store(of_v, token % block_tokens, width, at, v);
            }
        }
    }

    BlockStore &          store() { return store_; }
    const SenderReport &  report() const { return report_; }
    const ReceiverState & counts() { return receiver(); }
    std::mutex &          between_polls() { return between_polls_; }

    // The launches of a poll.
    void look(unsigned seed) {
        launch<PollMemory>(1, 1, int(o_.n_threads), seed,
                           [&](auto & block) { Look<TwinBlock<PollMemory>, TwinRules>(block, receiver()).look(); });
    }
    void work(unsigned seed) {
        launch<PollMemory>(int(o_.n_blocks), int(o_.n_resident), int(o_.n_threads), seed,
                           [&](auto & block) { Work<TwinBlock<PollMemory>, TwinRules>(block, receiver()).run(); });
    }
    void detach() {
        write(&report_.abort, 1);
        Setup nobody                           = receiver().setups[n_setups_ % 2];
        nobody.epoch                           = 0;
        receiver().setups[(n_setups_ + 1) % 2] = nobody;
        write(&receiver().setup_number.value, ++n_setups_);
    }

  private:
    using PollMemory = Shared<2 * max_width>; // of one or two threads, or of two warps with tiles

    ReceiverState & receiver() { return *reinterpret_cast<ReceiverState *>(state_.get()); }
    SenderState &   sender() { return *reinterpret_cast<SenderState *>(sender_.get()); }
    Failure         failure() const { return Failure(__atomic_load_n(&report_.failure, __ATOMIC_ACQUIRE)); }

    static void write(uint32_t * to, uint32_t value) { __atomic_store_n(to, value, __ATOMIC_RELAXED); }

    // Now and then a work never comes, since its launch failed, or comes twice.
    void poll() {
        for (unsigned seed = o_.seed; !ended_; ++seed) {
            const std::lock_guard lock(between_polls_);
            launch<PollMemory>(1, 1, 1, seed, [&](auto & block) {
                Look<TwinBlock<PollMemory>, TwinRules>(block, receiver()).watch(seed % 2 * 100000, &stop_);
            });
            look(seed);
            for (unsigned n = seed % 5 == 0 ? 0 : seed % 3 == 0 ? 2 : 1; n > 0; --n) {
                work(seed);
            }
        }
    }

    template <class Kernel> void run(int n_blocks, Kernel && kernel) {
        launch<SendShared>(n_blocks, 2, 1, ++seed_, [&](auto & block) {
            Send<TwinBlock<SendShared>> send(block, sender());
            kernel(send);
        });
    }

    const TwinOptions o_;
    Bytes             pool_, pages_, partials_, merges_, inbox_, outbox_, state_, sender_;
    BlockStore        store_;
    SenderReport      report_   = {};
    uint32_t          adopted_  = 0;
    uint32_t          stop_     = 0;
    uint32_t          n_setups_ = 0;
    unsigned          seed_     = 1;
    std::atomic<bool> ended_{ false };
    std::mutex        between_polls_;
    std::thread       polls_;
};

extern "C" {

// "": nothing is left out.
void twin_without(const char * what) {
    if (!leave_out(what)) {
        give_up("nothing of that name can be left out");
    }
}

Twin * twin_new(const TwinOptions * options) {
    return new Twin(*options);
}

void twin_delete(Twin * twin) {
    delete twin;
}

uint32_t twin_attach(Twin * twin, uint64_t epoch, const OpenTask * shape) {
    return uint32_t(twin->attach(epoch, *shape));
}

uint32_t twin_open(Twin * twin, const OpenTask * wanted, Handle * handle) {
    return uint32_t(twin->store().open(*wanted, *handle));
}

uint32_t twin_reserve(Twin * twin, Handle handle, uint32_t n_tokens) {
    return uint32_t(twin->store().reserve(handle, n_tokens));
}

uint32_t twin_trim(Twin * twin, Handle handle, uint32_t n_tokens) {
    return uint32_t(twin->store().trim(handle, n_tokens));
}

uint64_t twin_free_nbytes(Twin * twin) {
    return twin->store().free_nbytes();
}

uint32_t twin_attend(Twin * twin, const AttendTask * task, const SequenceRows * rows, const float * sinks,
                     const float * q, const float * k, const float * v, float * out, uint32_t most) {
    return uint32_t(twin->attend(*task, rows, sinks, q, k, v, out, most));
}

uint32_t twin_refusal(Twin * twin) {
    return twin->report().status;
}

void twin_set_epoch(Twin * twin, uint64_t epoch) {
    twin->set_epoch(epoch);
}

void twin_scribble(Twin * twin) {
    twin->scribble();
}

void twin_keep(Twin * twin, Handle handle, uint32_t first, uint32_t n, uint32_t width, const float * k,
               const float * v) {
    twin->keep(handle.place, first, n, width, k, v);
}

// Looks and works are the caller's from now on; and again the twin's.
void twin_hold(Twin * twin, int hold) {
    hold ? twin->between_polls().lock() : twin->between_polls().unlock();
}

// Whether a task is open after it.
int twin_look(Twin * twin) {
    twin->look(1);
    return int(twin->counts().is_open.value);
}

// Tasks done after it.
uint32_t twin_work(Twin * twin) {
    twin->work(1);
    return twin->counts().n_tasks;
}

// The sender is told to wait no more, and no look serves it from now on.
void twin_detach(Twin * twin) {
    twin->detach();
}

// Tasks done, refused; looks; items and outputs of the last task.
void twin_counts(Twin * twin, uint32_t counts[5]) {
    const std::lock_guard lock(twin->between_polls());
    const ReceiverState & s     = twin->counts();
    const uint32_t        all[] = { s.n_tasks, s.n_refused, s.n_looks, s.opened.n_items, s.opened.n_outputs };
    std::copy_n(all, 5, counts);
}

// The line between the hosts, both ends here; what is wrong with it, or "".
const char * twin_line(const char * path) {
    static std::string found;
    found               = "";
    const auto expected = [&](bool holds, const char * what) { found += holds || !found.empty() ? "" : what; };
    {
        Listener listener(path);
        try {
            Listener second(path);
            expected(false, "a second receiver");
        } catch (const ChannelError &) {
            while (listener.accept(0.0).is_open()) {
            }
        }
        struct stat about;
        expected(stat(path, &about) == 0 && (about.st_mode & 0777) == 0600, "others may open it");
        expected(!listener.accept(0.0).is_open(), "a sender that is none");
        Line      sender   = Line::connect(path);
        Line      receiver = listener.accept(5.0);
        Question  asked    = {}, taken;
        const int memory   = memfd_create("twin", MFD_CLOEXEC);
        int       file     = -1;
        asked.epoch        = 99;
        expected(receiver.is_open() && receiver.lives() && !receiver.wait(0.0), "a line that is none");
        expected(sender.give(&asked, sizeof(asked), memory, 5.0) && receiver.take(&taken, sizeof(taken), file, 5.0) &&
                     taken.epoch == 99 && file >= 0 && file != memory && pwrite(file, "x", 1, 41) == 1,
                 "a question that did not come");
        expected(fstat(memory, &about) == 0 && about.st_size == 42, "another file");
        expected(receiver.give(&asked, 10, -1, 5.0) && !sender.take(&taken, sizeof(taken), file, 5.0) && file == -1,
                 "half a message");
        sender.close();
        expected(!receiver.lives() && !receiver.take(&taken, sizeof(taken), file, 5.0), "an end that nobody notices");
    }
    try {
        Line::connect(path);
        expected(false, "a receiver after its end");
    } catch (const ChannelError &) {
    }
    return found.c_str();
}
}

namespace {

// Prompts in parts and single tokens of several sequences, with splits, on a receiver of `n_blocks` blocks.
std::vector<float> conversation(const TwinOptions & options, uint32_t type) {
    constexpr uint32_t n_head = 6, n_head_kv = 2, d = 32, n_sequences = 3;
    std::minstd_rand   random(5);
    const auto         floats = [&](size_t n) {
        std::vector<float> made(n);
        for (float & x : made) {
            x = float(random() % 2000) / 1000.0f - 1.0f;
        }
        return made;
    };
    Twin           twin(options);
    const OpenTask shape = { 2, 640, type, type, n_head_kv * d, n_head_kv * d };
    if (twin.attach(77, shape) != Failure::none) {
        give_up("attach");
    }
    Handle handles[n_sequences];
    for (Handle & handle : handles) {
        twin.store().open(shape, handle);
    }
    std::vector<float> all;
    uint32_t           positions[n_sequences] = {};
    for (const uint32_t n_rows : { 70u, 1u, 3u, 130u, 1u, 1u, 1u }) {
        for (uint32_t layer = 0; layer < 2; ++layer) {
            SequenceRows rows[n_sequences];
            for (uint32_t i = 0; i < n_sequences; ++i) {
                rows[i] = { handles[i], positions[i], n_rows + i };
                if (twin.store().reserve(handles[i], positions[i] + n_rows + i) != Status::ok) {
                    give_up("room");
                }
            }
            AttendTask task  = {};
            task.layer       = layer;
            task.n_rows      = 3 * n_rows + 3;
            task.n_sequences = n_sequences;
            task.n_head      = n_head;
            task.n_head_kv   = n_head_kv;
            task.d_k = task.d_v = d;
            task.scale          = 0.2f;
            const auto q = floats(task.n_rows * n_head * d), k = floats(task.n_rows * n_head_kv * d),
                       v = floats(task.n_rows * n_head_kv * d);
            std::vector<float> out(task.n_rows * n_head * d);
            if (twin.attend(task, rows, nullptr, q.data(), k.data(), v.data(), out.data(), 40) != Failure::none) {
                give_up("attention");
            }
            all.insert(all.end(), out.begin(), out.end());
        }
        for (uint32_t i = 0; i < n_sequences; ++i) {
            positions[i] += n_rows + i;
        }
    }
    return all;
}

} // namespace

int main(int n_arguments, char ** arguments) {
    if (n_arguments > 1) {
        twin_without(arguments[1]);
    }
    TwinOptions options   = { 5, 3, 2, 1, 0xfffffffau, 2, 1u << 17, 1u << 17, 16, 64, 1u << 24 };
    const auto  many      = conversation(options, kv_f16);
    options.n_blocks      = 1;
    options.n_threads     = 1;
    options.max_partials  = 2;
    const auto one        = conversation(options, kv_f16);
    double     difference = 0, total = 0;
    for (size_t i = 0; i < one.size(); ++i) {
        difference += std::pow(double(many[i]) - one[i], 2);
        total += std::pow(double(one[i]), 2);
    }
    if (!(difference < 1e-9 * total)) {
        give_up("many blocks give something else than one");
    }
    puts("ok");
}
