// Brings streamed weights from their file into host memory that a device copies from: a thread that reads ahead of the
// copier. Memory is pinned where the device has such memory: a pool that keeps what was read, as large as its limit
// allows, and two staging buffers for the rest.
#pragma once

#include "ggml-backend.h"
#include "ggml-cpp.h"

#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>

// Where the bytes of a lane come from.
struct oa_stream_memory {
    size_t      pooled = 0;     // bytes in the pinned pool
    size_t      limit  = 0;     // that the pool may have
    bool        pinned = false; // the staging buffers
    std::string note;           // why memory is not pinned; empty when it is
};

class oa_stream_reader {
  public:
    // One piece of a weight; data stays valid until done().
    struct piece {
        const char * data   = nullptr;
        size_t       nbytes = 0;
    };

    explicit oa_stream_reader(ggml_backend_dev_t device);
    ~oa_stream_reader();

    oa_stream_reader(const oa_stream_reader &)             = delete;
    oa_stream_reader & operator=(const oa_stream_reader &) = delete;

    // The copier's side. start: begin with a weight, after the last piece of the one before. next: wait for its next
    // piece; false after the last one, or when reading failed (error() says why). done: the piece was copied.
    void start(const ggml_tensor * weight);
    bool next(piece & result);
    void done();

    const std::string & error() const { return error_; } // of the weight started last

    oa_stream_memory memory();

  private:
    static constexpr int n_stages = 2;

    void   read_ahead();
    char * pooled(const ggml_tensor * weight, bool & is_new);
    void   allocate_stages();

    ggml_backend_buffer_type_t pinned_; // null: the device has none

    ggml_backend_buffer_ptr                                          stages_;
    std::unordered_map<const ggml_tensor *, ggml_backend_buffer_ptr> pool_;

    std::mutex              mutex_;
    std::condition_variable changed_;
    oa_stream_memory        memory_;
    const ggml_tensor *     weight_ = nullptr; // being read
    char *                  kept_   = nullptr; // its place in the pool; null: it goes through the stages
    bool                    ready_  = false;   // its bytes are in the pool already
    size_t                  n_read_ = 0;       // bytes, of weight_
    size_t                  n_sent_ = 0;       // bytes handed to the copier
    size_t                  n_done_ = 0;       // bytes copied
    std::string             error_;
    bool                    stop_ = false;
    std::thread             thread_;
};
