#include "slot_copier.h"

#include "stream_source.h"
#include "trace.h"

#include <chrono>
#include <random>
#include <utility>

namespace {

void sleep_a_little() {
    if (const int most = oa_slots_seam().delay_us) {
        thread_local std::minstd_rand random(1);
        std::this_thread::sleep_for(std::chrono::microseconds(random() % unsigned(most)));
    }
}

bool is_to_fail() {
    std::atomic<int> & left = oa_slots_seam().fails_in;
    return left >= 0 && left.fetch_sub(1) == 0;
}

} // namespace

oa_slot_seam & oa_slots_seam() {
    static oa_slot_seam seam;
    return seam;
}

oa_slot_copier::~oa_slot_copier() {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        stop_ = true;
    }
    changed_.notify_all();
    if (thread_.joinable()) {
        thread_.join();
    }
}

void oa_slot_copier::queue(const std::vector<oa_slot_upload> & uploads) {
    if (uploads.empty()) {
        return;
    }
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        waiting_.insert(waiting_.end(), uploads.begin(), uploads.end());
    }
    if (!thread_.joinable()) {
        thread_ = std::thread([this] { copy_all(); });
    }
    changed_.notify_all();
}

std::vector<oa_slot_upload> oa_slot_copier::take_done() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return std::exchange(done_, {});
}

size_t oa_slot_copier::n_waiting() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return waiting_.size() + copying_;
}

void oa_slot_copier::copy_all() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
        changed_.wait(lock, [&] { return stop_ || !waiting_.empty(); });
        if (stop_) {
            return;
        }
        oa_slot_upload upload = waiting_.front();
        waiting_.pop_front();
        copying_ = true;
        lock.unlock();
        sleep_a_little();
        upload.error = copy(upload);
        sleep_a_little();
        lock.lock();
        copying_ = false;
        done_.push_back(std::move(upload));
    }
}

// Blocking writes: the device has all bytes behind them, or, behind RPC, gets them before any later message.
std::string oa_slot_copier::copy(const oa_slot_upload & upload) {
    if (is_to_fail()) {
        return "an upload of experts failed, as a test asked";
    }
    const oa_layer_slots & slots = *upload.layer->slots;
    for (const auto & [weight, part] : slots.weights) {
        const int     axis   = oa_experts_axis(weight);
        const size_t  nbytes = weight->nb[axis], from = nbytes * size_t(upload.expert);
        const int64_t since = oa_trace_now();
        const char *  bytes = static_cast<const char *>(weight->data) + from;
        // A mapping vanishes with its file; the file itself says so.
        if (OA_STREAM_FILE(weight) != 0) {
            char * const      read  = stage(slots.device, nbytes);
            const std::string error = oa_stream_source_read(weight, read, from, nbytes);
            if (!error.empty()) {
                return error;
            }
            bytes = read;
        }
        ggml_backend_tensor_set(part, bytes, nbytes * upload.slot, nbytes);
        oa_trace_add(ggml_backend_dev_name(slots.device), "stream", weight->name, nbytes, since);
        upload.layer->uploaded_nbytes.fetch_add(int64_t(nbytes), std::memory_order_relaxed);
    }
    upload.layer->uploads.fetch_add(1, std::memory_order_relaxed);
    return "";
}

char * oa_slot_copier::stage(ggml_backend_dev_t device, size_t nbytes) {
    ggml_backend_buffer_ptr & buffer = stages_[device];
    if (!buffer || ggml_backend_buffer_get_size(buffer.get()) < nbytes) {
        buffer.reset();
        const ggml_backend_buffer_type_t pinned = ggml_backend_dev_host_buffer_type(device);
        buffer.reset(pinned ? ggml_backend_buft_alloc_buffer(pinned, nbytes) : nullptr);
        if (!buffer) {
            buffer.reset(ggml_backend_buft_alloc_buffer(ggml_backend_cpu_buffer_type(), nbytes));
        }
        GGML_ASSERT(buffer && "memory for one expert");
    }
    return static_cast<char *>(ggml_backend_buffer_get_base(buffer.get()));
}
