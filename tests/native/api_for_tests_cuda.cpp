// Both sides of a channel on GPUs as plain functions on arrays of the host, for tests/weave/test_weave_cuda.py and
// bench/weave_cuda.py, which compile this with csrc/weave/cuda; no part of the engine. Not for several threads.
//
// Functions that can fail return a negative number, or null; wc_error() says why.
#include "for_tests_cuda.h"
#include "receive_cuda.h"
#include "receiver_cuda.h"

#include <vector>

using namespace oa::weave;
using namespace oa::weave::cuda;

extern "C" {

const char * wc_error() {
    return last_error.c_str();
}

CudaReceiver * wc_receiver_new(const char * path, uint64_t quota_nbytes, uint32_t slot_nbytes, uint32_t n_slots,
                               uint32_t distance, int plain) {
    return guarded(
        [&] {
            CudaReceiverOptions options;
            options.quota_nbytes = quota_nbytes;
            options.task_nbytes = options.result_nbytes = slot_nbytes;
            options.n_slots                             = n_slots;
            options.distance                            = { distance, distance, 16 };
            options.working                             = plain ? Working::plain : Working::best;
            return new CudaReceiver(path, options);
        },
        static_cast<CudaReceiver *>(nullptr));
}

void wc_receiver_delete(CudaReceiver * receiver) {
    delete receiver;
}

// Looks, tasks, refused tasks, senders, sequences.
int wc_receiver_stats(CudaReceiver * receiver, uint32_t counts[5]) {
    return guarded(
        [&] {
            const CudaReceiverStats s     = receiver->stats();
            const uint32_t          all[] = { s.n_looks, s.n_tasks, s.n_refused, s.n_senders, s.n_sequences };
            std::copy_n(all, 5, counts);
            return 0;
        },
        -1);
}

// A cold model: `n_graphs` graphs of `n_nodes` kernels of `node_ns` each, looks between them if wanted. Seconds of all.
double wc_cold_graphs(CudaReceiver * receiver, uint32_t n_graphs, uint32_t n_nodes, uint64_t node_ns, int looks,
                      int captured) {
    return guarded(
        [&] {
            Stream   stream;
            Event    first, last;
            Launches work(captured != 0, stream, [&] {
                for (uint32_t i = 0; i < n_nodes; ++i) {
                    check(launch_busy(node_ns, stream), "keep the device busy");
                    if (looks) {
                        receiver->worked(1, 1, stream);
                    }
                }
            });
            first.record(stream);
            for (uint32_t i = 0; i < n_graphs; ++i) {
                receiver->begin(stream);
                work.launch();
                receiver->end();
            }
            last.record(stream);
            stream.wait();
            return last.seconds_since(first);
        },
        -1.0);
}

CudaSender * wc_sender_new(const char * path, const OpenTask * shape, double deadline_s, uint32_t base) {
    return guarded([&] { return new CudaSender(path, *shape, 0, options_of(deadline_s, base)); },
                   static_cast<CudaSender *>(nullptr));
}

void wc_sender_delete(CudaSender * sender) {
    delete sender;
}

const char * wc_sender_way(CudaSender * sender) {
    return name_of(sender->way());
}

uint32_t wc_sender_open(CudaSender * sender, const OpenTask * wanted, Handle * handle) {
    return uint32_t(sender->open(*wanted, *handle));
}

uint32_t wc_sender_reserve(CudaSender * sender, Handle handle, uint32_t n_tokens) {
    return uint32_t(sender->reserve(handle, n_tokens));
}

uint32_t wc_sender_trim(CudaSender * sender, Handle handle, uint32_t n_tokens) {
    return uint32_t(sender->trim(handle, n_tokens));
}

// `n_layers` layers of the same rows, of which the last one's results are given back; captured: as a graph, launched
// twice. Seconds of a launch, negative: failed.
double wc_sender_attend(CudaSender * sender, const AttendTask * task, const SequenceRows * rows, const float * sinks,
                        const float * q, const float * k, const float * v, float * out, uint32_t n_layers,
                        int captured) {
    return guarded(
        [&] {
            const size_t  n = task->n_rows;
            OnGpu<float>  of_q(q, n * task->n_head * task->d_k), of_k(k, n * task->n_head_kv * task->d_k);
            OnGpu<float>  of_v(v, n * task->n_head_kv * task->d_v), of_out(nullptr, n * task->n_head * task->d_v);
            OnGpu<float>  of_sinks(sinks, sinks ? task->n_head : 0);
            CudaAttention wanted = attention_of(*task, of_q, of_k, of_v, sinks ? of_sinks.get() : nullptr, of_out);
            Stream        stream;
            Event         first, last;
            Launches      work(captured != 0, stream, [&] {
                for (uint32_t i = 0; i < n_layers; ++i) {
                    wanted.task.layer = task->layer + i;
                    sender->send(wanted, stream);
                    sender->receive(wanted, stream);
                }
            });
            for (int i = 0; i <= captured; ++i) {
                sender->plan(rows, task->n_sequences, stream);
                first.record(stream);
                work.launch();
                last.record(stream);
                stream.wait();
            }
            of_out.copy_to(out);
            if (!sender->lives()) {
                throw ChannelError(sender->error());
            }
            return last.seconds_since(first);
        },
        -1.0);
}

// Seconds of the receiver's launch alone, for one task of a row of every sequence; both sides are this process's.
double wc_task_seconds(CudaReceiver * receiver, CudaSender * sender, const AttendTask * task, const SequenceRows * rows,
                       uint32_t repeats) {
    return guarded(
        [&] {
            const size_t        n = task->n_rows;
            OnGpu<float>        q(nullptr, n * task->n_head * task->d_k), k(nullptr, n * task->n_head_kv * task->d_k);
            OnGpu<float>        v(nullptr, n * task->n_head_kv * task->d_v), out(nullptr, n * task->n_head * task->d_v);
            const CudaAttention wanted = attention_of(*task, q, k, v, nullptr, out);
            Stream              there, here;
            std::vector<double> times;
            for (uint32_t i = 0; i < repeats; ++i) {
                Event first, last;
                receiver->begin(there); // nobody else looks
                sender->plan(rows, task->n_sequences, here);
                sender->send(wanted, here);
                here.wait();
                first.record(there);
                receiver->worked(1, 1, there);
                last.record(there);
                there.wait();
                receiver->end();
                sender->receive(wanted, here);
                here.wait();
                if (!sender->lives()) {
                    throw ChannelError(sender->error());
                }
                times.push_back(last.seconds_since(first));
            }
            std::sort(times.begin(), times.end());
            return times[times.size() / 2];
        },
        -1.0);
}
}
