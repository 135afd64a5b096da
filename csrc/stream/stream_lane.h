// One device's part of a weight stream: its slots, the items of the current graph, and the thread that copies them.
// weight_stream.h has the invariants. All calls but the copier's own come from the thread that computes.
//
// A device whose queues wait for one another (CUDA) keeps the order itself: the copier hands copies to a queue of its
// own, events order them with what the device computes, and no thread waits for the device. Elsewhere the host keeps
// the order: the copier's copies block, and the computing thread waits until a slot has been read.
#pragma once

#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "stream_reader.h"
#include "weight_stream.h"

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

class oa_stream_lane {
  public:
    oa_stream_lane(ggml_backend_t backend, ggml_backend_buffer_type_t buft, int n_slots);
    ~oa_stream_lane();

    oa_stream_lane(const oa_stream_lane &)             = delete;
    oa_stream_lane & operator=(const oa_stream_lane &) = delete;

    // The graph: forget the last one; a weight that `split` reads from `copy`.
    void clear() { items_.clear(); }
    void add(ggml_tensor * weight, ggml_tensor * copy, int split) { items_.push_back({ weight, copy, split }); }

    // Memory for this graph's items and any before: plan, nothing is allocated (a dry run); allocate, false when there
    // is not enough.
    void   plan();
    bool   allocate();
    size_t size() const; // bytes

    // The computation, see weight_stream.h.
    void            begin();
    oa_stream_state wait(const ggml_tensor * input, int split);
    void            submitted(int split);
    void            end();

    std::string      error(); // why the last wait failed
    oa_stream_memory memory() { return reader_.memory(); }
    const char *     device() const { return ggml_backend_dev_name(device_); }

  private:
    struct item {
        ggml_tensor * weight;
        ggml_tensor * copy;
        int           split;
    };
    struct slot {
        ggml_tensor *          bytes = nullptr; // the whole slot as I8
        ggml_backend_event_ptr free;            // its tenant has been read; null: the backend has no events
        ggml_backend_event_ptr full;            // its tenant has been copied; null: the host keeps the order
        int64_t                tenant = -1;     // number of the job that was copied last
    };
    struct job {
        const ggml_tensor * weight;
        size_t              slot;
        size_t              nbytes; // with the padding that kernels may read
        int64_t             number;
    };

    void grow();
    void queue(size_t from, size_t to);
    void release(size_t end);
    void forget();
    void copy_jobs();
    void copy(const job & job);
    void put(const slot & to, const char * data, size_t at, size_t nbytes);
    void put_padding(const slot & to, size_t at, size_t nbytes);
    void sleep_a_little();

    ggml_backend_t             backend_;
    ggml_backend_dev_t         device_;
    ggml_backend_buffer_type_t buft_;
    ggml_backend_ptr           queue_; // the device's, for copies; null: the host keeps the order
    const size_t               wanted_slots_;
    int                        jitter_us_; // random delays on both sides, for tests

    std::vector<item>                items_;
    std::vector<const ggml_tensor *> ahead_; // copied ahead for the next graph, into slots 0, 1, ..
    bool                             running_     = false;
    size_t                           next_submit_ = 0; // item
    size_t                           next_free_   = 0; // item
    int64_t                          base_        = 0; // number of item 0's job
    int64_t                          n_queued_    = 0; // jobs are numbered over all graphs

    std::vector<size_t>     sizes_; // of the slots: that of the largest weight that any batch puts there
    ggml_context_ptr        ctx_;
    ggml_backend_buffer_ptr buffer_;
    std::vector<slot>       slots_;
    ggml_backend_buffer_ptr zeros_; // pinned, for padding that the queue copies

    // Shared with the copier. A slot's tenant is written by the copier alone.
    std::mutex              mutex_;
    std::condition_variable changed_;
    std::deque<job>         jobs_;
    int64_t                 n_copied_ = 0; // jobs; with a queue: that were handed to it
    int64_t                 n_read_   = 0; // jobs that the device has finished with (their slots' `free` is
                                           // recorded, with a queue), or that were forgotten
    bool             copying_ = false;
    bool             stop_    = false;
    std::string      error_; // of a copy since the last forget()
    oa_stream_reader reader_;
    std::thread      copier_;
};
