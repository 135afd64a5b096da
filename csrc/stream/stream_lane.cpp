#include "stream_lane.h"

#include "tensor_flags.h"
#include "trace.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <numeric>
#include <random>

namespace {

// Any address but null tells the graph allocator that a tensor has its memory; a dry run computes nothing.
void * const nowhere = reinterpret_cast<void *>(uintptr_t(1) << 12);

// A second queue of the device, where an event that one queue records can be waited for by the other, from any thread.
// ggml does not say where that is so. ggml-vulkan's events may be touched by one thread, and not across queues.
ggml_backend_t copy_queue(ggml_backend_dev_t device) {
    const std::string      name   = ggml_backend_reg_name(ggml_backend_dev_backend_reg(device));
    const char *           asked  = std::getenv("OALLAMA_STREAM_QUEUE");
    const bool             wanted = asked ? std::atoi(asked) != 0 : name == "CUDA";
    ggml_backend_dev_props props;
    ggml_backend_dev_get_props(device, &props);
    return wanted && props.caps.async && props.caps.events ? ggml_backend_dev_init(device, nullptr) : nullptr;
}

} // namespace

oa_stream_lane::oa_stream_lane(ggml_backend_t backend, ggml_backend_buffer_type_t buft, int n_slots) :
    backend_(backend), device_(ggml_backend_get_device(backend)), buft_(buft), queue_(copy_queue(device_)),
    wanted_slots_(size_t(n_slots)), reader_(device_) {
    const char * jitter = std::getenv("OALLAMA_STREAM_JITTER");
    jitter_us_          = jitter ? std::atoi(jitter) : 0;
}

// The backend may be gone by now: llama_context frees its backends before its scheduler.
oa_stream_lane::~oa_stream_lane() {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        stop_ = true;
    }
    changed_.notify_all();
    if (copier_.joinable()) {
        copier_.join();
    }
    if (queue_) {
        ggml_backend_synchronize(queue_.get()); // copies ahead, from memory that goes now
    }
}

// ---- memory --------------------------------------------------------------------------------------------------------

void oa_stream_lane::grow() {
    const size_t align = ggml_backend_buft_get_alignment(buft_);
    sizes_.resize(std::max(sizes_.size(), std::min(wanted_slots_, items_.size())));
    // Weights that are streamed for every token come into the same slots whatever the batch. Else a smaller batch
    // streams some of them only, and each may come into any slot.
    const bool always =
        std::all_of(items_.begin(), items_.end(), [](auto & it) { return OA_STREAM_FROM(it.weight) <= 1; });
    for (size_t i = 0; i < items_.size(); ++i) {
        const size_t size = GGML_PAD(ggml_backend_buft_get_alloc_size(buft_, items_[i].copy), align);
        for (size_t slot = 0; slot < sizes_.size(); ++slot) {
            if (!always || slot == i % sizes_.size()) {
                sizes_[slot] = std::max(sizes_[slot], size);
            }
        }
    }
}

size_t oa_stream_lane::size() const {
    return std::accumulate(sizes_.begin(), sizes_.end(), size_t(0));
}

void oa_stream_lane::plan() {
    grow();
    for (const item & it : items_) {
        it.copy->data = nowhere;
    }
}

bool oa_stream_lane::allocate() {
    const std::vector<size_t> before = sizes_;
    grow();
    if (sizes_ != before || (!sizes_.empty() && !buffer_)) {
        forget();
        slots_.clear();
        buffer_.reset();
        buffer_.reset(ggml_backend_buft_alloc_buffer(buft_, size()));
        if (!buffer_) {
            return false;
        }
        ctx_.reset(ggml_init({ sizes_.size() * ggml_tensor_overhead(), nullptr, true }));
        char * at = static_cast<char *>(ggml_backend_buffer_get_base(buffer_.get()));
        for (const size_t size : sizes_) {
            slot s;
            s.bytes         = ggml_new_tensor_1d(ctx_.get(), GGML_TYPE_I8, int64_t(size));
            s.bytes->buffer = buffer_.get();
            s.bytes->data   = at;
            s.free.reset(ggml_backend_event_new(device_));
            if (queue_) {
                s.full.reset(ggml_backend_event_new(device_));
            }
            slots_.push_back(std::move(s));
            at += size;
        }
        std::vector<const ggml_tensor *> weights;
        for (const item & it : items_) {
            weights.push_back(it.weight);
        }
        reader_.pin_ahead(weights);
    }
    for (size_t i = 0; i < items_.size(); ++i) {
        const slot & s         = slots_[i % slots_.size()];
        items_[i].copy->buffer = buffer_.get();
        items_[i].copy->data   = s.bytes->data;
    }
    return true;
}

// ---- the computation -----------------------------------------------------------------------------------------------

void oa_stream_lane::begin() {
    if (items_.empty()) {
        return;
    }
    const auto same = [](const ggml_tensor * weight, const item & it) { return weight == it.weight; };
    // After a failed computation or copy jobs are left that nobody will read.
    if (running_ || !error().empty() || ahead_.size() > items_.size() ||
        !std::equal(ahead_.begin(), ahead_.end(), items_.begin(), same)) {
        forget();
    }
    running_     = true;
    next_submit_ = 0;
    next_free_   = 0;
    base_        = n_queued_ - int64_t(ahead_.size());
    queue(ahead_.size(), items_.size());
    ahead_.clear();
    if (!copier_.joinable()) {
        copier_ = std::thread([this] { copy_jobs(); });
    }
}

oa_stream_state oa_stream_lane::wait(const ggml_tensor * input, int split) {
    for (size_t i = next_submit_; i < items_.size() && items_[i].split == split; ++i) {
        if (items_[i].weight == input) {
            sleep_a_little();
            const int64_t                since = oa_trace_now();
            std::unique_lock<std::mutex> lock(mutex_);
            changed_.wait(lock, [&] { return n_copied_ > base_ + int64_t(i) || !error_.empty(); });
            oa_trace_add(device(), "wait", input->name, 0, since);
            if (!error_.empty()) {
                return OA_STREAM_FAILED;
            }
            lock.unlock();
            if (queue_) {
                ggml_backend_event_wait(backend_, slots_[i % slots_.size()].full.get());
            }
            return OA_STREAM_READY;
        }
    }
    return OA_STREAM_NONE;
}

std::string oa_stream_lane::error() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return error_;
}

void oa_stream_lane::submitted(int split) {
    for (; next_submit_ < items_.size() && items_[next_submit_].split == split; ++next_submit_) {
        if (ggml_backend_event_t event = slots_[next_submit_ % slots_.size()].free.get()) {
            ggml_backend_event_record(event, backend_);
        }
        // The copy of item i + 1 needs the slot of i + 1 - n_slots; while this waits the device has item i to do.
        const size_t n_reading = queue_ ? 0 : slots_.size() - 1;
        if (next_submit_ + 1 > n_reading) {
            release(next_submit_ + 1 - n_reading);
        }
    }
}

// Items before `end` have been read: waits for the device unless that keeps the order itself, then gives their slots
// to the copier. Without a queue, backends' events may be touched by the thread that computes only (ggml-vulkan
// recycles command buffers in them).
void oa_stream_lane::release(size_t end) {
    for (; next_free_ < end; ++next_free_) {
        if (queue_) {
            // the copier's queue waits for the event
        } else if (ggml_backend_event_t event = slots_[next_free_ % slots_.size()].free.get()) {
            ggml_backend_event_synchronize(event);
        } else {
            ggml_backend_synchronize(backend_);
        }
        sleep_a_little();
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            n_read_ = base_ + int64_t(next_free_) + 1;
        }
        changed_.notify_all();
    }
}

void oa_stream_lane::end() {
    if (items_.empty()) {
        return;
    }
    running_             = false;
    const size_t n_ahead = std::min(slots_.size(), items_.size());
    queue(0, n_ahead);
    for (size_t i = 0; i < n_ahead; ++i) {
        ahead_.push_back(items_[i].weight);
    }
    release(items_.size());
}

void oa_stream_lane::queue(size_t from, size_t to) {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        for (size_t i = from; i < to; ++i) {
            jobs_.push_back({ items_[i].weight, i % slots_.size(),
                              ggml_backend_buft_get_alloc_size(buft_, items_[i].copy), n_queued_++ });
        }
    }
    changed_.notify_all();
}

void oa_stream_lane::forget() {
    {
        std::unique_lock<std::mutex> lock(mutex_);
        jobs_.clear();
        changed_.wait(lock, [&] { return !copying_; });
        n_copied_ = n_read_ = n_queued_;
        error_.clear();
    }
    ahead_.clear();
    running_ = false;
    ggml_backend_synchronize(backend_); // what was handed to the device may still read slots
    if (queue_) {
        ggml_backend_synchronize(queue_.get());
    }
}

// ---- the copier ----------------------------------------------------------------------------------------------------

void oa_stream_lane::copy_jobs() {
    std::unique_lock<std::mutex> lock(mutex_);
    const auto ready = [&] { return error_.empty() && !jobs_.empty() && slots_[jobs_.front().slot].tenant < n_read_; };
    while (true) {
        changed_.wait(lock, [&] { return stop_ || ready(); });
        if (stop_) {
            return;
        }
        const job next = jobs_.front();
        jobs_.pop_front();
        copying_ = true;
        lock.unlock();
        copy(next);
        lock.lock();
        slots_[next.slot].tenant = next.number;
        error_                   = reader_.error();
        n_copied_                = error_.empty() ? next.number + 1 : n_copied_;
        copying_                 = false;
        changed_.notify_all();
    }
}

void oa_stream_lane::copy(const job & job) {
    const slot & to = slots_[job.slot];
    sleep_a_little();
    const size_t nbytes = ggml_nbytes(job.weight);
    const bool   traced = oa_trace_now() != 0;
    if (queue_ && to.tenant >= 0) {
        ggml_backend_event_wait(queue_.get(), to.free.get());
        if (traced) {
            ggml_backend_synchronize(queue_.get()); // a span begins when the copy can
        }
    }
    const int64_t since = oa_trace_now();
    reader_.start(job.weight);
    oa_stream_reader::piece piece;
    for (size_t at = 0; reader_.next(piece); at += piece.nbytes) {
        put(to, piece.data, at, piece.nbytes);
        if (queue_ && !piece.stays) {
            ggml_backend_synchronize(queue_.get());
        }
        reader_.done();
    }
    if (job.nbytes > nbytes) {
        put_padding(to, nbytes, job.nbytes - nbytes);
    }
    if (queue_) {
        ggml_backend_event_record(to.full.get(), queue_.get());
        if (traced) {
            ggml_backend_synchronize(queue_.get());
        }
    }
    oa_trace_add(ggml_backend_dev_name(device_), "stream", job.weight->name, nbytes, since);
    sleep_a_little();
}

void oa_stream_lane::put(const slot & to, const char * data, size_t at, size_t nbytes) {
    if (queue_) {
        ggml_backend_tensor_set_async(queue_.get(), to.bytes, data, at, nbytes);
    } else {
        ggml_backend_tensor_set(to.bytes, data, at, nbytes);
    }
}

// Some kernels read the padding behind the last row, where another weight was before.
void oa_stream_lane::put_padding(const slot & to, size_t at, size_t nbytes) {
    if (!queue_) {
        const std::vector<char> zeros(nbytes, 0);
        put(to, zeros.data(), at, nbytes);
        return;
    }
    if (!zeros_ || ggml_backend_buffer_get_size(zeros_.get()) < nbytes) {
        ggml_backend_synchronize(queue_.get());
        ggml_backend_buffer_type_t pinned = ggml_backend_dev_host_buffer_type(device_);
        zeros_.reset(ggml_backend_buft_alloc_buffer(pinned ? pinned : ggml_backend_cpu_buffer_type(), nbytes));
        GGML_ASSERT(zeros_ && "zeros for the padding of streamed weights");
        ggml_backend_buffer_clear(zeros_.get(), 0);
    }
    put(to, static_cast<const char *>(ggml_backend_buffer_get_base(zeros_.get())), at, nbytes);
}

void oa_stream_lane::sleep_a_little() {
    if (jitter_us_ > 0) {
        thread_local std::minstd_rand random(std::random_device{}());
        std::this_thread::sleep_for(std::chrono::microseconds(random() % unsigned(jitter_us_)));
    }
}
