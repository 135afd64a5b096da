// Both sides of a channel on GPUs as plain functions on arrays of the host, for tests/test_weave_cuda.py and
// bench/weave_cuda.py, which compile this with the rest of the folder; no part of the engine. Not for several threads.
//
// Functions that can fail return a negative number, or null; wc_error() says why.
#include "cuda_check.h"
#include "guest_op.h"
#include "receive_cuda.h"
#include "receiver_cuda.h"
#include "sender_cuda.h"
#include "weave_hooks_cuda.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

using namespace oa::weave;
using namespace oa::weave::cuda;

namespace {

std::string last_error;

template <class Action> auto guarded(Action && action, decltype(action()) failed) -> decltype(action()) {
    try {
        return action();
    } catch (const std::exception & e) {
        last_error = e.what();
        return failed;
    }
}

// A copy on the device.
template <class T> class OnGpu {
  public:
    OnGpu(const T * from, size_t n) : n_(n) {
        check(cudaMalloc(reinterpret_cast<void **>(&data_), std::max<size_t>(n, 1) * sizeof(T)), "allocate");
        check(from ? cudaMemcpy(data_, from, n * sizeof(T), cudaMemcpyHostToDevice) :
                     cudaMemset(data_, 0, n * sizeof(T)),
              "copy to the device");
    }
    ~OnGpu() { cudaFree(data_); }

    OnGpu(const OnGpu &)             = delete;
    OnGpu & operator=(const OnGpu &) = delete;

    T *  get() const { return data_; }
    void copy_to(T * to) const { check(cudaMemcpy(to, data_, n_ * sizeof(T), cudaMemcpyDeviceToHost), "copy back"); }

  private:
    T *    data_ = nullptr;
    size_t n_;
};

class Stream {
  public:
    Stream() { check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "make a stream"); }
    ~Stream() { cudaStreamDestroy(stream_); }

    Stream(const Stream &)             = delete;
    Stream & operator=(const Stream &) = delete;

         operator cudaStream_t() const { return stream_; }
    void wait() const { check(cudaStreamSynchronize(stream_), "finish"); }

  private:
    cudaStream_t stream_ = nullptr;
};

class Event {
  public:
    Event() { check(cudaEventCreate(&event_), "make an event"); }
    ~Event() { cudaEventDestroy(event_); }

    Event(const Event &)             = delete;
    Event & operator=(const Event &) = delete;

    void   record(cudaStream_t stream) const { check(cudaEventRecord(event_, stream), "record an event"); }
    double seconds_since(const Event & first) const {
        float ms = 0;
        check(cudaEventElapsedTime(&ms, first.event_, event_), "measure");
        return double(ms) * 1e-3;
    }

  private:
    cudaEvent_t event_ = nullptr;
};

// A captured graph, or launches one by one.
template <class Enqueue> class Work {
  public:
    Work(bool captured, const Stream & stream, Enqueue enqueue) :
        captured_(captured), stream_(stream), enqueue_(enqueue) {
        if (captured) {
            check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed), "capture");
            enqueue_();
            check(cudaStreamEndCapture(stream, &graph_), "capture");
            check(cudaGraphInstantiate(&instance_, graph_, nullptr, nullptr, 0), "make a graph");
        }
    }
    ~Work() {
        if (captured_) {
            cudaGraphExecDestroy(instance_);
            cudaGraphDestroy(graph_);
        }
    }

    Work(const Work &)             = delete;
    Work & operator=(const Work &) = delete;

    void launch() {
        if (captured_) {
            check(cudaGraphLaunch(instance_, stream_), "launch a graph");
        } else {
            enqueue_();
        }
    }

  private:
    const bool      captured_;
    const Stream &  stream_;
    Enqueue         enqueue_;
    cudaGraph_t     graph_    = nullptr;
    cudaGraphExec_t instance_ = nullptr;
};

CudaAttention attention_of(const AttendTask & task, const OnGpu<float> & q, const OnGpu<float> & k,
                           const OnGpu<float> & v, const float * sinks, const OnGpu<float> & out) {
    CudaAttention made = {};
    made.task          = task;
    made.sinks         = sinks;
    made.q             = q.get();
    made.k             = k.get();
    made.v             = v.get();
    made.q_stride      = size_t(task.n_head) * task.d_k;
    made.k_stride      = size_t(task.n_head_kv) * task.d_k;
    made.v_stride      = size_t(task.n_head_kv) * task.d_v;
    made.out           = out.get();
    return made;
}

// Of ggml: rows of n1 heads of n0 values.
ggml_tensor tensor_of(const float * data, size_t n0, size_t n1, size_t n_rows) {
    ggml_tensor  made  = {};
    const size_t ne[4] = { n0, n1, n_rows, 1 };
    made.type          = GGML_TYPE_F32;
    made.data          = const_cast<float *>(data);
    for (int i = 0; i < 4; ++i) {
        made.ne[i] = int64_t(ne[i]);
        made.nb[i] = i == 0 ? sizeof(float) : made.nb[i - 1] * ne[i - 1];
    }
    return made;
}

// The operators of a layer as guest_graph.cpp makes them.
struct GraphLayer {
    GraphLayer(const CudaAttention & wanted, uint32_t sender, const float * own, size_t n_own, float * out) :
        task(wanted.task), q(tensor_of(wanted.q, task.d_k, task.n_head, task.n_rows)),
        k(tensor_of(wanted.k, task.d_k, task.n_head_kv, task.n_rows)),
        v(tensor_of(wanted.v, task.d_v, task.n_head_kv, task.n_rows)),
        sinks(tensor_of(wanted.sinks, task.n_head, 1, 1)), local(tensor_of(own, wanted.out_stride(), n_own, 1)),
        send(tensor_of(wanted.out, wanted.out_stride(), task.n_rows, 1)),
        receive(tensor_of(out, wanted.out_stride(), n_own + task.n_rows, 1)) {
        send.op = receive.op = GGML_OP_CUSTOM;
        send.src[0]          = &q;
        send.src[1]          = &k;
        send.src[2]          = &v;
        send.src[3]          = wanted.sinks ? &sinks : nullptr;
        receive.src[0]       = &send;
        receive.src[1]       = n_own > 0 ? &local : nullptr;
        set_guest_op(&send, { GuestOp::Kind::send, sender, &task });
        set_guest_op(&receive, { GuestOp::Kind::receive, sender, &task });
    }

    GraphLayer(const GraphLayer &)             = delete;
    GraphLayer & operator=(const GraphLayer &) = delete;

    bool supported(int device) const {
        return oa_weave_cuda_supports(device, &send) && oa_weave_cuda_supports(device, &receive);
    }

    AttendTask    task;
    ggml_tensor   q, k, v, sinks, local, send, receive;
    ggml_tensor * nodes[2] = { &send, &receive };
};

} // namespace

extern "C" {

const char * wc_error() {
    return last_error.c_str();
}

CudaReceiver * wc_receiver_new(const char * path, uint64_t quota_nbytes, uint32_t slot_nbytes, uint32_t n_slots,
                               uint32_t every) {
    return guarded(
        [&] {
            CudaReceiverOptions options;
            options.quota_nbytes = quota_nbytes;
            options.task_nbytes = options.result_nbytes = slot_nbytes;
            options.n_slots                             = n_slots;
            options.every                               = every;
            return new CudaReceiver(path, options);
        },
        static_cast<CudaReceiver *>(nullptr));
}

void wc_receiver_delete(CudaReceiver * receiver) {
    delete receiver;
}

// Polls, tasks, refused tasks, senders, sequences.
int wc_receiver_stats(CudaReceiver * receiver, uint32_t counts[5]) {
    return guarded(
        [&] {
            const CudaReceiverStats s     = receiver->stats();
            const uint32_t          all[] = { s.n_polls, s.n_tasks, s.n_refused, s.n_senders, s.n_sequences };
            std::copy_n(all, 5, counts);
            return 0;
        },
        -1);
}

// A cold model: `n_graphs` graphs of `n_nodes` kernels of `node_ns` each, polls between them if wanted. Seconds of all.
double wc_cold_graphs(CudaReceiver * receiver, uint32_t n_graphs, uint32_t n_nodes, uint64_t node_ns, int polls,
                      int captured) {
    return guarded(
        [&] {
            Stream stream;
            Event  first, last;
            Work   work(captured != 0, stream, [&] {
                for (uint32_t i = 0; i < n_nodes; ++i) {
                    check(launch_busy(node_ns, stream), "keep the device busy");
                    if (polls) {
                        receiver->poll(stream);
                    }
                }
            });
            first.record(stream);
            for (uint32_t i = 0; i < n_graphs; ++i) {
                receiver->begin(stream);
                work.launch();
                receiver->end(stream);
            }
            last.record(stream);
            stream.wait();
            return last.seconds_since(first);
        },
        -1.0);
}

// As ggml-cuda with patch 0012: `n_graphs` graphs of `n_nodes` kernels of `node_ns` each, captured from the third on.
int wc_ggml_graphs(uint32_t n_graphs, uint32_t n_nodes, uint64_t node_ns) {
    return guarded(
        [&] {
            Stream          stream;
            int             device   = 0;
            cudaGraph_t     graph    = nullptr;
            cudaGraphExec_t instance = nullptr;
            check(cudaGetDevice(&device), "tell the current device");
            for (uint32_t i = 0; i < n_graphs; ++i) {
                oa_weave_cuda_begin(device, stream);
                const bool captures = i == 2;
                if (captures) {
                    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed), "capture");
                }
                for (uint32_t node = 0; node < n_nodes && !instance; ++node) {
                    check(launch_busy(node_ns, stream), "keep the device busy");
                    oa_weave_cuda_poll(device, stream);
                }
                if (captures) {
                    check(cudaStreamEndCapture(stream, &graph), "capture");
                    check(cudaGraphInstantiate(&instance, graph, nullptr, nullptr, 0), "make a graph");
                }
                if (instance) {
                    check(cudaGraphLaunch(instance, stream), "launch a graph");
                }
                oa_weave_cuda_end(device, stream);
            }
            stream.wait();
            if (instance) {
                cudaGraphExecDestroy(instance);
                cudaGraphDestroy(graph);
            }
            return 0;
        },
        -1);
}

CudaSender * wc_sender_new(const char * path, const OpenTask * shape, double deadline_s, uint32_t base) {
    return guarded(
        [&] {
            SenderOptions options;
            options.deadline_s = deadline_s;
            options.base       = base;
            return new CudaSender(path, *shape, 0, options);
        },
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
            Work          work(captured != 0, stream, [&] {
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

// A sender as libllama gets it from ggml-cuda's registry.
CudaSender * wc_graph_sender_new(const char * path, const OpenTask * shape, double deadline_s, uint32_t base) {
    return guarded(
        [&] {
            SenderOptions options;
            options.deadline_s = deadline_s;
            options.base       = base;
            return static_cast<CudaSender *>(oa_weave_new_cuda_sender(0, path, *shape, options).release());
        },
        static_cast<CudaSender *>(nullptr));
}

// As wc_sender_attend, by the operators of a graph: `n_own` rows of results of the model's own, then the guests'.
int wc_graph_attend(CudaSender * sender, const AttendTask * task, const SequenceRows * rows, const float * sinks,
                    const float * q, const float * k, const float * v, float * out, const float * own, uint32_t n_own,
                    int captured) {
    return guarded(
        [&] {
            const size_t n = task->n_rows, width = size_t(task->n_head) * task->d_v;
            OnGpu<float> of_q(q, n * task->n_head * task->d_k), of_k(k, n * task->n_head_kv * task->d_k);
            OnGpu<float> of_v(v, n * task->n_head_kv * task->d_v), of_sent(nullptr, n * width);
            OnGpu<float> of_sinks(sinks, sinks ? task->n_head : 0), of_own(own, n_own * width);
            OnGpu<float> of_out(nullptr, (n_own + n) * width);
            GraphLayer   layer(attention_of(*task, of_q, of_k, of_v, sinks ? of_sinks.get() : nullptr, of_sent),
                               sender->number(), of_own.get(), n_own, of_out.get());
            if (!layer.supported(0) || layer.supported(1)) {
                throw ChannelError("the operators belong to the sender's device");
            }
            Stream stream;
            Work   work(captured != 0, stream, [&] {
                for (ggml_tensor * node : layer.nodes) {
                    if (!oa_weave_cuda_forward(stream, node)) {
                        throw ChannelError("an operator is not the sender's");
                    }
                }
            });
            for (int i = 0; i <= captured; ++i) {
                sender->set_rows({ rows, rows + task->n_sequences });
                oa_weave_cuda_plan(stream, layer.nodes, 2);
                work.launch();
                stream.wait();
            }
            of_out.copy_to(out);
            if (!sender->lives()) {
                throw ChannelError(sender->error());
            }
            return 0;
        },
        -1);
}

uint32_t wc_graph_number(CudaSender * sender) {
    return sender->number();
}

// Whether operators are the sender's when one thing about them is another.
int wc_graph_supported(CudaSender * sender, const char * what) {
    const std::string changed = what;
    CudaAttention     wanted  = {};
    wanted.task.n_rows        = 2;
    wanted.task.n_head        = 4;
    wanted.task.n_head_kv     = 2;
    wanted.task.d_k           = changed == "width" ? 63 : 64;
    wanted.task.d_v           = 64;
    const uint32_t number     = sender->number() + (changed == "number");
    float          own        = 0.0f;
    GraphLayer     layer(wanted, number, &own, 1, nullptr);
    if (changed == "mark") {
        set_guest_op(&layer.send, {});
    } else if (changed == "operator") {
        layer.send.op = layer.receive.op = GGML_OP_MAP_CUSTOM1;
    } else if (changed == "offset") {
        layer.k.view_offs = 8;
    } else if (changed == "heads") {
        layer.q.nb[1] *= 2;
    } else if (changed == "type") {
        layer.v.type = GGML_TYPE_F16;
    } else if (changed == "source") { // a copy that the scheduler has made
        layer.receive.src[0] = &layer.local;
    }
    return layer.supported(changed == "device" ? 1 : 0);
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
                receiver->poll(there);
                last.record(there);
                there.wait();
                receiver->end(there);
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
