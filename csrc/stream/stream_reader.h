// Brings streamed weights from their file into host memory that a device copies from. Memory is pinned where the device
// has such memory: a pool that keeps what was read, as large as its limit allows, and two staging buffers for the rest.
// Threads of their own fill the pool from the moment on that a context is made (pin_ahead), so that the first prompt
// does not wait for page-locking and reading; another reads ahead of the copier what they have not come to.
#pragma once

#include "ggml-backend.h"
#include "ggml-cpp.h"

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

// Where the bytes of a lane come from.
struct oa_stream_memory {
    size_t      pooled = 0;     // bytes in the pinned pool, those that are still being read included
    size_t      limit  = 0;     // that the pool may have
    bool        pinned = false; // the staging buffers
    std::string note;           // why memory is not pinned; empty when it is
};

class oa_stream_reader {
  public:
    // One piece of a weight; data is valid until done(), or as long as the reader and the weight are.
    struct piece {
        const char * data   = nullptr;
        size_t       nbytes = 0;
        bool         stays  = false;
    };

    explicit oa_stream_reader(ggml_backend_dev_t device);
    ~oa_stream_reader();

    oa_stream_reader(const oa_stream_reader &)             = delete;
    oa_stream_reader & operator=(const oa_stream_reader &) = delete;

    // Reads these weights into the pool, in this order, while others compute; those that are there already are left
    // out.
    void pin_ahead(const std::vector<const ggml_tensor *> & weights);

    // The copier's side. start: begin with a weight, after the last piece of the one before. next: wait for its next
    // piece; false after the last one, or when reading failed (error() says why). done: the piece was copied.
    void start(const ggml_tensor * weight);
    bool next(piece & result);
    void done();

    std::string error(); // of the weight started last

    oa_stream_memory memory();

  private:
    static constexpr int n_stages = 2;

    // A weight's bytes in host memory. Whoever made it reads it; others see how far that has come.
    struct place {
        ggml_backend_buffer_ptr buffer;
        char *                  base   = nullptr; // null while memory is asked for
        size_t                  n_read = 0;
        bool                    failed = false; // it has no memory, or its file could not be read
        std::string             error;
    };
    using place_ptr = std::shared_ptr<place>;

    place_ptr pooled(const ggml_tensor * weight, bool & is_new);
    place_ptr pin(const ggml_tensor * weight, std::unique_lock<std::mutex> & lock);
    void      fill(const ggml_tensor * weight, place & to, std::unique_lock<std::mutex> & lock);
    void      drop(const ggml_tensor * weight, place & at, const std::string & error);
    void      read_ahead();
    void      fill_pool();
    void      allocate_stages();
    bool      is_pinned(const ggml_tensor * weight) const; // where it is: a file that is not mapped
    size_t    n_ready() const { return place_ ? place_->n_read : n_read_; }
    bool      has_failed() const { return !error_.empty() || (place_ && place_->failed); }

    ggml_backend_buffer_type_t pinned_; // null: the device has none

    ggml_backend_buffer_ptr stages_;

    std::mutex                                         mutex_;
    std::condition_variable                            changed_;
    std::unordered_map<const ggml_tensor *, place_ptr> pool_;
    std::deque<const ggml_tensor *>                    ahead_; // for the pool
    oa_stream_memory                                   memory_;
    const ggml_tensor *                                weight_ = nullptr; // of the copier
    place_ptr                                          place_; // of weight_; null: it goes through the stages
    bool                     is_new_ = false;                  // place_ was made for the copier: read_ahead() fills it
    size_t                   n_read_ = 0;                      // bytes, of weight_, through the stages
    size_t                   n_sent_ = 0;                      // bytes handed to the copier
    size_t                   n_done_ = 0;                      // bytes copied
    std::string              error_;                           // of weight_, through the stages
    bool                     stop_ = false;
    std::thread              thread_;
    std::vector<std::thread> fillers_;
};
