// What api_for_tests_cuda.cpp and graphs_for_tests_cuda.cpp are written in: arrays, streams and graphs on the device.
#pragma once

#include "cuda_check.h"
#include "sender_cuda.h"

#include <algorithm>
#include <string>

namespace oa::weave::cuda {

inline std::string last_error;

template <class Action> auto guarded(Action && action, decltype(action()) failed) -> decltype(action()) {
    try {
        return action();
    } catch (const std::exception & e) {
        last_error = e.what();
        return failed;
    }
}

inline SenderOptions options_of(double deadline_s, uint32_t base) {
    SenderOptions options;
    options.deadline_s = deadline_s;
    options.base       = base;
    return options;
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
template <class Enqueue> class Launches {
  public:
    Launches(bool captured, const Stream & stream, Enqueue enqueue) :
        captured_(captured), stream_(stream), enqueue_(enqueue) {
        if (captured) {
            check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed), "capture");
            enqueue_();
            check(cudaStreamEndCapture(stream, &graph_), "capture");
            check(cudaGraphInstantiate(&instance_, graph_, nullptr, nullptr, 0), "make a graph");
        }
    }
    ~Launches() {
        if (captured_) {
            cudaGraphExecDestroy(instance_);
            cudaGraphDestroy(graph_);
        }
    }

    Launches(const Launches &)             = delete;
    Launches & operator=(const Launches &) = delete;

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

inline CudaAttention attention_of(const AttendTask & task, const OnGpu<float> & q, const OnGpu<float> & k,
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

} // namespace oa::weave::cuda
