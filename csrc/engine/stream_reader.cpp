#include "stream_reader.h"

#include "host_memory.h"
#include "stream_source.h"
#include "tensor_flags.h"

#include <algorithm>
#include <cstdlib>

namespace {

constexpr size_t stage_bytes = 4 << 20;

// Half of what is free now: pinned memory is lost to everybody else.
size_t pool_limit() {
    if (const char * text = std::getenv("OALLAMA_PIN_LIMIT")) {
        return size_t(std::max(0LL, std::atoll(text)));
    }
    const size_t memory = oa_host_memory();
    return memory == SIZE_MAX ? 0 : memory / 2;
}

} // namespace

oa_stream_reader::oa_stream_reader(ggml_backend_dev_t device) : pinned_(ggml_backend_dev_host_buffer_type(device)) {
    if (pinned_) {
        memory_.limit = pool_limit();
    } else {
        memory_.note = "the device has no pinned memory";
    }
}

oa_stream_reader::~oa_stream_reader() {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        stop_ = true;
    }
    changed_.notify_all();
    if (thread_.joinable()) {
        thread_.join();
    }
}

// ---- memory --------------------------------------------------------------------------------------------------------

// A weight's place in the pool, null when there is no room for it.
char * oa_stream_reader::pooled(const ggml_tensor * weight, bool & is_new) {
    is_new        = false;
    const auto it = pool_.find(weight);
    if (it != pool_.end()) {
        return static_cast<char *>(ggml_backend_buffer_get_base(it->second.get()));
    }
    const size_t nbytes = ggml_nbytes(weight);
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (memory_.pooled + nbytes > memory_.limit) {
            if (pinned_ && memory_.note.empty()) {
                memory_.note = "weights beyond the limit of pinned memory are read anew each time";
            }
            return nullptr;
        }
    }
    ggml_backend_buffer_ptr           buffer(ggml_backend_buft_alloc_buffer(pinned_, nbytes));
    const std::lock_guard<std::mutex> lock(mutex_);
    // A device whose request for pinned memory is refused gives other memory.
    if (!buffer || ggml_backend_buffer_get_type(buffer.get()) != pinned_) {
        memory_.limit = memory_.pooled;
        memory_.note  = "the system refused more pinned memory";
        return nullptr;
    }
    memory_.pooled += nbytes;
    is_new        = true;
    char * base   = static_cast<char *>(ggml_backend_buffer_get_base(buffer.get()));
    pool_[weight] = std::move(buffer);
    return base;
}

void oa_stream_reader::allocate_stages() {
    if (stages_) {
        return;
    }
    if (pinned_) {
        stages_.reset(ggml_backend_buft_alloc_buffer(pinned_, n_stages * stage_bytes));
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    memory_.pinned = stages_ && ggml_backend_buffer_get_type(stages_.get()) == pinned_;
    if (!stages_) {
        stages_.reset(ggml_backend_buft_alloc_buffer(ggml_backend_cpu_buffer_type(), n_stages * stage_bytes));
    }
    GGML_ASSERT(stages_ && "8 MiB for staging streamed weights");
}

oa_stream_memory oa_stream_reader::memory() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return memory_;
}

// ---- the copier's side ---------------------------------------------------------------------------------------------

void oa_stream_reader::start(const ggml_tensor * weight) {
    // Without a file the weight itself is copied: it is as the file would have it if the host can read it.
    const bool in_memory = OA_STREAM_FILE(weight) == 0 && ggml_backend_buffer_is_host(weight->buffer);
    bool       is_new    = false;
    char *     kept      = in_memory ? static_cast<char *>(weight->data) : pooled(weight, is_new);
    if (!kept) {
        allocate_stages();
    }
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        weight_ = weight;
        kept_   = kept;
        ready_  = kept && !is_new;
        n_read_ = ready_ ? ggml_nbytes(weight) : 0;
        n_sent_ = n_done_ = 0;
        error_.clear();
        if (OA_STREAM_FILE(weight) == 0 && !in_memory) {
            error_ = std::string("'") + weight->name + "' cannot be streamed: it is repacked, and there is no file";
        }
    }
    if (!thread_.joinable()) {
        thread_ = std::thread([this] { read_ahead(); });
    }
    changed_.notify_all();
}

bool oa_stream_reader::next(piece & result) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return n_sent_ < n_read_ || n_sent_ == ggml_nbytes(weight_) || !error_.empty(); });
    if (!error_.empty() || n_sent_ == ggml_nbytes(weight_)) {
        if (!error_.empty() && kept_) {
            pool_.erase(weight_); // it is not whole
            memory_.pooled -= ggml_nbytes(weight_);
        }
        return false;
    }
    if (kept_) {
        result = { kept_ + n_sent_, n_read_ - n_sent_ };
    } else {
        char * base = static_cast<char *>(ggml_backend_buffer_get_base(stages_.get()));
        result = { base + (n_sent_ / stage_bytes) % n_stages * stage_bytes, std::min(stage_bytes, n_read_ - n_sent_) };
    }
    n_sent_ += result.nbytes;
    return true;
}

void oa_stream_reader::done() {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        n_done_ = n_sent_;
    }
    changed_.notify_all();
}

// ---- the reader's side ---------------------------------------------------------------------------------------------

void oa_stream_reader::read_ahead() {
    std::unique_lock<std::mutex> lock(mutex_);
    const auto                   wanted = [&] {
        if (!weight_ || ready_ || !error_.empty() || n_read_ == ggml_nbytes(weight_)) {
            return false;
        }
        return kept_ || n_read_ - n_done_ + stage_bytes <= n_stages * stage_bytes;
    };
    while (true) {
        changed_.wait(lock, [&] { return stop_ || wanted(); });
        if (stop_) {
            return;
        }
        const ggml_tensor * weight = weight_;
        const size_t        from   = n_read_;
        const size_t        n      = std::min(stage_bytes, ggml_nbytes(weight) - from);
        char *              to     = kept_ ? kept_ + from : nullptr;
        if (!to) {
            char * base = static_cast<char *>(ggml_backend_buffer_get_base(stages_.get()));
            to          = base + (from / stage_bytes) % n_stages * stage_bytes;
        }
        lock.unlock();
        std::string error = oa_stream_source_read(weight, to, from, n);
        lock.lock();
        error_ = std::move(error);
        if (error_.empty()) {
            n_read_ = from + n;
        }
        changed_.notify_all();
    }
}
