#include "sender.h"

#include "clock.h"
#include "ggml.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>

namespace oa::weave {

namespace {

constexpr int      n_spins = 2000; // about 50 us
constexpr double   nap_s   = 1e-3; // between two looks at whether the receiver lives
constexpr double   look_s  = 0.01;
constexpr uint32_t tile    = 64; // rows: parts of a tiled task begin on a tile

const char * words(Status status) {
    switch (status) {
        case Status::ok: return "ok";
        case Status::malformed: return "the task is malformed";
        case Status::unknown_sequence: return "the sequence is unknown";
        case Status::no_room: return "there is no room";
    }
    return "an unknown answer";
}

} // namespace

size_t token_nbytes(const OpenTask & shape) {
    return shape.n_layers * (ggml_row_size(ggml_type(shape.k_type), shape.k_width) +
                             ggml_row_size(ggml_type(shape.v_type), shape.v_width));
}

Sender::Sender(const std::string & path, const SenderOptions & options) :
    options_(options), path_(path), region_(Region::attach(path)), ring_(region_, region_.header().n_slots) {
    std::random_device random;
    uint64_t           epoch = 0;
    while (epoch == 0 || epoch == region_.load_acquire<uint64_t>(word::accepted)) {
        epoch = (uint64_t(random()) << 32) | random();
    }
    ring_.attach(epoch, options.base);
    const double end = oa_now() + options.attach_s;
    region_.store_release<uint32_t>(word::doorbell, region_.load_acquire<uint32_t>(word::doorbell) + 1);
    region_.wake(word::doorbell);
    while (!ring_.accepted()) {
        if (oa_now() > end || !lives()) {
            throw ChannelError(failed() ? error_ : "the receiver of " + path + " does not answer");
        }
        region_.wait(word::done, region_.load_acquire<uint32_t>(word::done), nap_s);
    }
    attached_ = true;
    std::vector<char> canary(2048), back(canary.size());
    std::iota(canary.begin(), canary.end(), char(epoch));
    const Status status = call(Kind::ping, canary.data(), canary.size(), back.data(), back.size());
    const bool   same =
        std::equal(canary.begin(), canary.end(), back.begin(), [](char a, char b) { return b == char(~a); });
    if (status != Status::ok || !same) {
        throw ChannelError(failed() ? error_ : path + ": what is written on one side does not arrive on the other");
    }
}

bool Sender::wants_guests() const {
    return !failed() && region_.load_acquire<uint32_t>(word::state) == uint32_t(State::ready);
}

bool Sender::lives() {
    const double time = oa_now();
    if (failed() || time < looked_at_ + look_s) {
        return !failed();
    }
    looked_at_          = time;
    const uint32_t beat = region_.load_acquire<uint32_t>(word::heartbeat);
    if (!region_.other_lives() || region_.load_acquire<uint32_t>(word::state) == uint32_t(State::ended)) {
        return fail("is gone");
    }
    if (attached_ && !ring_.accepted()) {
        return fail("has forgotten this sender");
    }
    if (beat != beat_ || beat_at_ == 0.0) {
        beat_    = beat;
        beat_at_ = time;
    } else if (time > beat_at_ + options_.deadline_s / 2) {
        return fail("has given no sign of life for " + std::to_string(int((time - beat_at_) * 1e3)) + " ms");
    }
    return true;
}

Status Sender::open(const OpenTask & wanted, Handle & handle) {
    return call(Kind::open, &wanted, sizeof(wanted), &handle, sizeof(handle));
}

Status Sender::reserve(Handle handle, uint32_t n_tokens) {
    const ReserveTask task = { handle, n_tokens };
    return call(Kind::reserve, &task, sizeof(task), nullptr, 0);
}

Status Sender::trim(Handle handle, uint32_t n_tokens) {
    const ReserveTask task = { handle, n_tokens };
    return call(Kind::trim, &task, sizeof(task), nullptr, 0);
}

Status Sender::call(Kind kind, const void * task, size_t nbytes, void * result, size_t result_nbytes) {
    while (!sent_.empty() && !failed()) {
        await_oldest(); // each has a deadline of its own
    }
    if (!begin_task(nbytes)) {
        return Status::malformed;
    }
    memcpy(task_.data(), task, nbytes);
    const uint32_t number = ring_.next();
    publish(kind, nbytes);
    Status status = Status::malformed;
    if (await(number, options_.deadline_s) && take_result(number, result, result_nbytes, status) &&
        status == Status::malformed) {
        fail(std::string("refuses: ") + words(status));
    }
    return status;
}

// A free slot, and private memory for a payload; false: failed.
bool Sender::begin_task(size_t nbytes) {
    // A result stays in its slot until it is taken: a task of this slot's next turn would be answered over it.
    while (!failed() && !sent_.empty() && ring_.next() - sent_.front().number >= region_.header().n_slots) {
        await_oldest();
    }
    if (!failed() && !ring_.has_credit()) {
        fail("has lost count");
    }
    if (task_.size() < nbytes) {
        task_.resize(nbytes);
    }
    return !failed();
}

void Sender::publish(Kind kind, size_t nbytes) {
    TaskHeader * task   = region_.task(ring_.slot(ring_.next()));
    TaskHeader   header = {};
    header.epoch        = ring_.epoch();
    header.number       = ring_.next();
    header.kind         = kind;
    header.nbytes       = uint32_t(nbytes);
    header.checksum     = checksum(header, task_.data());
    memcpy(payload(task), task_.data(), nbytes);
    memcpy(task, &header, sizeof(header));
    ring_.publish();
    region_.store_release<uint32_t>(word::doorbell, region_.load_acquire<uint32_t>(word::doorbell) + 1);
    __atomic_thread_fence(__ATOMIC_SEQ_CST); // with the receiver's, which shows that it sleeps and then looks
    if (region_.load_acquire<uint32_t>(word::rx_sleeping)) {
        region_.wake(word::doorbell);
    }
}

// A whole result goes to its place; a refusal has no payload. False: failed.
bool Sender::take_result(uint32_t number, void * to, size_t nbytes, Status & status) {
    ResultHeader * result = region_.result(ring_.slot(number));
    ResultHeader   header;
    memcpy(&header, result, sizeof(header));
    if (!answers(header, ring_.epoch(), number, nbytes)) {
        return fail("gave a damaged answer");
    }
    std::copy_n(payload(result), header.nbytes, static_cast<char *>(to));
    if (header.checksum != checksum(header, to)) {
        return fail("gave a damaged answer");
    }
    status = header.status;
    return true;
}

bool Sender::await(uint32_t number, double seconds) {
    for (int i = 0; i < n_spins; ++i) {
        if (ring_.completed(number)) {
            return true;
        }
        oa_pause();
    }
    const double end = oa_now() + seconds;
    bool         done;
    while (!(done = ring_.completed(number)) && lives()) {
        if (oa_now() > end) {
            return fail("has not answered for " + std::to_string(int(seconds * 1e3)) + " ms");
        }
        ring_.restore();
        const uint32_t seen = region_.load_acquire<uint32_t>(word::done);
        region_.store_release<uint32_t>(word::tx_sleeping, 1);
        __atomic_thread_fence(__ATOMIC_SEQ_CST);
        if (!ring_.completed(number)) {
            region_.wait(word::done, seen, nap_s);
        }
        region_.store_release<uint32_t>(word::tx_sleeping, 0);
    }
    return done;
}

bool Sender::await_oldest() {
    const Sent oldest = sent_.front();
    sent_.erase(sent_.begin());
    const double begin = oa_now();
    const bool   done  = await(oldest.number, options_.deadline_s);
    waited_s_ += oa_now() - begin;
    Status status;
    if (!done || !take_result(oldest.number, oldest.out, oldest.n_floats * sizeof(float), status)) {
        return false;
    }
    return status == Status::ok || fail(std::string("refuses: ") + words(status));
}

bool Sender::awaits_rows() const {
    return std::any_of(sent_.begin(), sent_.end(), [](const Sent & sent) { return sent.n_floats > 0; });
}

bool Sender::send(const Attention & wanted) {
    AttendTask task     = wanted.task;
    task.has_sinks      = wanted.sinks != nullptr;
    const size_t   n    = rows_of_a_task(task, region_.header().task_nbytes, region_.header().result_nbytes);
    const uint32_t most = uint32_t(task.tiled ? n / tile * tile : n);
    if (most == 0) {
        return fail("has slots that are too small for a row");
    }
    for (uint32_t first = 0; first < wanted.task.n_rows; first += most) {
        if (!send_part(wanted, first, std::min(most, wanted.task.n_rows - first))) {
            return false;
        }
    }
    return true;
}

bool Sender::send_part(const Attention & wanted, uint32_t first, uint32_t n_rows) {
    AttendTask                task = wanted.task;
    std::vector<SequenceRows> rows;
    uint32_t                  at = 0;
    for (uint32_t i = 0; i < wanted.task.n_sequences; ++i) {
        const SequenceRows & given = wanted.rows[i];
        const uint32_t       begin = std::max(at, first), end = std::min(at + given.n_rows, first + n_rows);
        if (begin < end) {
            rows.push_back({ given.handle, given.position + (begin - at), end - begin });
        }
        at += given.n_rows;
    }
    task.n_rows      = n_rows;
    task.n_sequences = uint32_t(rows.size());
    task.has_sinks   = wanted.sinks != nullptr;
    const AttendLayout layout(task);
    if (!begin_task(layout.nbytes)) {
        return false;
    }
    char *     to   = task_.data();
    const auto copy = [&](size_t offset, const float * from, size_t stride, size_t width) {
        for (uint32_t row = 0; row < n_rows; ++row) {
            memcpy(to + offset + row * width * sizeof(float), from + (first + row) * stride, width * sizeof(float));
        }
    };
    memcpy(to, &task, sizeof(task));
    memcpy(to + layout.rows, rows.data(), rows.size() * sizeof(SequenceRows));
    if (wanted.sinks) {
        memcpy(to + layout.sinks, wanted.sinks, task.n_head * sizeof(float));
    }
    if (task.n_head > 0) {
        copy(layout.q, wanted.q, wanted.q_stride, size_t(task.n_head) * task.d_k);
    }
    copy(layout.k, wanted.k, wanted.k_stride, size_t(task.n_head_kv) * task.d_k);
    copy(layout.v, wanted.v, wanted.v_stride, size_t(task.n_head_kv) * task.d_v);
    const size_t out_row = size_t(task.n_head) * task.d_v;
    sent_.push_back({ ring_.next(), wanted.out + first * out_row, n_rows * out_row });
    publish(task.n_head > 0 ? Kind::attend : Kind::append, layout.nbytes);
    return true;
}

bool Sender::receive() {
    while (awaits_rows() && !failed()) {
        await_oldest();
    }
    return !failed();
}

bool Sender::fail(const std::string & why) {
    if (error_.empty()) {
        error_ = "the receiver of " + path_ + " " + why;
    }
    sent_.clear();
    return false;
}

} // namespace oa::weave
