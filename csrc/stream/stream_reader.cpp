#include "stream_reader.h"

#include "host_memory.h"
#include "stream_source.h"
#include "tensor_flags.h"

#include <algorithm>
#include <cstdlib>

namespace {

constexpr size_t   stage_bytes = 4 << 20;
constexpr unsigned max_fillers = 4; // a guess: not measured on a GPU yet

// Half of what is free now: pinned memory is lost to everybody else.
size_t pool_limit() {
    if (const char * text = std::getenv("OALLAMA_PIN_LIMIT")) {
        return size_t(std::max(0LL, std::atoll(text)));
    }
    const size_t memory = oa_host_memory();
    return memory == SIZE_MAX ? 0 : memory / 2;
}

unsigned n_fillers() {
    return std::clamp(std::thread::hardware_concurrency() / 4, 1u, max_fillers);
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
    for (std::thread & filler : fillers_) {
        filler.join();
    }
}

// ---- the pool ------------------------------------------------------------------------------------------------------

// A weight's place in the pool, null when there is no room for it. is_new: the caller reads it.
oa_stream_reader::place_ptr oa_stream_reader::pooled(const ggml_tensor * weight, bool & is_new) {
    std::unique_lock<std::mutex> lock(mutex_);
    const auto                   it = pool_.find(weight);
    is_new                          = it == pool_.end();
    if (is_new) {
        return pin(weight, lock);
    }
    const place_ptr found = it->second;
    changed_.wait(lock, [&] { return found->base || found->failed; });
    return found->base ? found : nullptr;
}

oa_stream_reader::place_ptr oa_stream_reader::pin(const ggml_tensor * weight, std::unique_lock<std::mutex> & lock) {
    const size_t nbytes = ggml_nbytes(weight);
    if (memory_.pooled + nbytes > memory_.limit) {
        if (pinned_ && memory_.note.empty()) {
            memory_.note = "weights beyond the limit of pinned memory are read anew each time";
        }
        return nullptr;
    }
    const auto made = std::make_shared<place>();
    pool_[weight]   = made;
    memory_.pooled += nbytes;
    lock.unlock();
    ggml_backend_buffer_ptr buffer(ggml_backend_buft_alloc_buffer(pinned_, nbytes));
    lock.lock();
    // A device whose request for pinned memory is refused gives other memory.
    if (!buffer || ggml_backend_buffer_get_type(buffer.get()) != pinned_) {
        drop(weight, *made, "");
        memory_.limit = memory_.pooled;
        memory_.note  = "the system refused more pinned memory";
        return nullptr;
    }
    made->base   = static_cast<char *>(ggml_backend_buffer_get_base(buffer.get()));
    made->buffer = std::move(buffer);
    changed_.notify_all();
    return made;
}

// Reads a weight into its place, or says there why that failed.
void oa_stream_reader::fill(const ggml_tensor * weight, place & to, std::unique_lock<std::mutex> & lock) {
    const size_t nbytes = ggml_nbytes(weight);
    while (to.n_read < nbytes && !stop_) {
        const size_t from = to.n_read, n = std::min(stage_bytes, nbytes - from);
        lock.unlock();
        const std::string error = oa_stream_source_read(weight, to.base + from, from, n);
        lock.lock();
        if (!error.empty()) {
            drop(weight, to, error);
            return;
        }
        to.n_read = from + n;
        changed_.notify_all();
    }
}

// A place that is not whole: whoever wants the weight next tries again.
void oa_stream_reader::drop(const ggml_tensor * weight, place & at, const std::string & error) {
    at.failed = true;
    at.error  = error;
    memory_.pooled -= ggml_nbytes(weight);
    pool_.erase(weight);
    changed_.notify_all();
}

void oa_stream_reader::pin_ahead(const std::vector<const ggml_tensor *> & weights) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!pinned_ || memory_.limit == 0) {
        return;
    }
    for (const ggml_tensor * weight : weights) {
        if (OA_STREAM_FILE(weight) != 0 && !is_pinned(weight) && !pool_.count(weight)) {
            ahead_.push_back(weight);
        }
    }
    while (!ahead_.empty() && fillers_.size() < n_fillers()) {
        fillers_.emplace_back([this] { fill_pool(); });
    }
    changed_.notify_all();
}

void oa_stream_reader::fill_pool() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
        changed_.wait(lock, [&] { return stop_ || !ahead_.empty(); });
        if (stop_) {
            return;
        }
        const ggml_tensor * weight = ahead_.front();
        ahead_.pop_front();
        if (pool_.count(weight)) {
            continue;
        }
        if (const place_ptr made = pin(weight, lock)) {
            fill(weight, *made, lock);
        } else {
            ahead_.clear(); // the pool is full
        }
    }
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

bool oa_stream_reader::is_pinned(const ggml_tensor * weight) const {
    return pinned_ && weight->buffer && ggml_backend_buffer_get_type(weight->buffer) == pinned_;
}

oa_stream_memory oa_stream_reader::memory() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return memory_;
}

// ---- the copier's side ---------------------------------------------------------------------------------------------

void oa_stream_reader::start(const ggml_tensor * weight) {
    // Without a file the weight itself is copied: it is as the file would have it if the host can read it.
    const bool in_memory =
        is_pinned(weight) || (OA_STREAM_FILE(weight) == 0 && ggml_backend_buffer_is_host(weight->buffer));
    bool      is_new = false;
    place_ptr at;
    if (in_memory) {
        at         = std::make_shared<place>();
        at->base   = static_cast<char *>(weight->data);
        at->n_read = ggml_nbytes(weight);
    } else if (OA_STREAM_FILE(weight) != 0) {
        at = pooled(weight, is_new);
    }
    if (!at) {
        allocate_stages();
    }
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        weight_ = weight;
        place_  = at;
        is_new_ = at && is_new;
        n_read_ = n_sent_ = n_done_ = 0;
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
    changed_.wait(lock, [&] { return n_sent_ < n_ready() || n_sent_ == ggml_nbytes(weight_) || has_failed(); });
    if (has_failed() || n_sent_ == ggml_nbytes(weight_)) {
        return false;
    }
    if (place_) {
        result = { place_->base + n_sent_, place_->n_read - n_sent_, true };
    } else {
        char * base = static_cast<char *>(ggml_backend_buffer_get_base(stages_.get()));
        result = { base + (n_sent_ / stage_bytes) % n_stages * stage_bytes, std::min(stage_bytes, n_read_ - n_sent_),
                   false };
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

std::string oa_stream_reader::error() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return place_ && place_->failed ? place_->error : error_;
}

// ---- the thread that reads ahead of the copier ---------------------------------------------------------------------

void oa_stream_reader::read_ahead() {
    std::unique_lock<std::mutex> lock(mutex_);
    const auto                   wanted = [&] {
        if (!weight_ || has_failed() || n_ready() == ggml_nbytes(weight_)) {
            return false;
        }
        return place_ ? is_new_ : n_read_ - n_done_ + stage_bytes <= n_stages * stage_bytes;
    };
    while (true) {
        changed_.wait(lock, [&] { return stop_ || wanted(); });
        if (stop_) {
            return;
        }
        const ggml_tensor * weight = weight_;
        if (const place_ptr at = place_) {
            fill(weight, *at, lock);
            continue;
        }
        const size_t from = n_read_;
        const size_t n    = std::min(stage_bytes, ggml_nbytes(weight) - from);
        char *       base = static_cast<char *>(ggml_backend_buffer_get_base(stages_.get()));
        lock.unlock();
        std::string error =
            oa_stream_source_read(weight, base + (from / stage_bytes) % n_stages * stage_bytes, from, n);
        lock.lock();
        error_ = std::move(error);
        if (error_.empty()) {
            n_read_ = from + n;
        }
        changed_.notify_all();
    }
}
