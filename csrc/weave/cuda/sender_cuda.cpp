#include "sender_cuda.h"

#include "clock.h"
#include "cuda_check.h"

#include <algorithm>
#include <cstring>
#include <random>
#include <unistd.h>

namespace oa::weave::cuda {

namespace {

const char * words(Failure failure) {
    switch (failure) {
        case Failure::none: return "is well";
        case Failure::late: return "has not answered in time";
        case Failure::aborted: return "is not waited for any more";
        case Failure::damaged: return "gave a damaged answer";
        case Failure::refused: return "refuses a task";
        case Failure::lost_count: return "has been sent more tasks than there are slots";
        case Failure::no_way: return "does not get what is written here";
    }
    return "has failed";
}

bool is_aligned(const void * data, size_t stride) {
    return reinterpret_cast<uintptr_t>(data) % 16 == 0 && stride % 4 == 0;
}

} // namespace

CudaSender::CudaSender(const std::string & path, const OpenTask & shape, int device, const SenderOptions & options) :
    device_(device), options_(options), path_(path), line_(Line::connect(path)) {
    const OnDevice here(device);
    std::string    why;
    try {
        check(cudaMalloc(reinterpret_cast<void **>(&state_), sizeof(SenderState)), "allocate the sender's state");
        check(cudaHostAlloc(reinterpret_cast<void **>(&report_), sizeof(SenderReport), cudaHostAllocMapped),
              "allocate pinned memory");
        check(cudaHostAlloc(reinterpret_cast<void **>(&plan_), sizeof(SendPlan), cudaHostAllocDefault),
              "allocate pinned memory");
        check(cudaEventCreateWithFlags(&planned_, cudaEventDisableTiming), "make an event");
        look();
        for (const Way way : all_ways) {
            try {
                attach(shape, way);
                return;
            } catch (const ChannelError & e) {
                why += std::string(why.empty() ? "" : "; ") + name_of(way) + ": " + e.what();
                error_.clear();
            }
        }
    } catch (...) {
        let_go();
        throw;
    }
    let_go();
    throw ChannelError("no memory to share with the receiver of " + path + ": " + why);
}

CudaSender::~CudaSender() {
    int before = 0;
    cudaGetDevice(&before);
    cudaSetDevice(device_);
    let_go();
    cudaSetDevice(before);
}

void CudaSender::let_go() {
    cudaStreamSynchronize(cudaStreamPerThread); // attach()'s; not the device, which spoils others' captures
    inbox_.reset();                             // before its owner frees it
    if (line_.is_open()) {
        Question question = {};
        question.ask      = Ask::detach; // from here on the receiver does not touch our memory
        int file          = -1;
        ask(question, -1, file);
    }
    outbox_.reset();
    cudaFree(state_);
    cudaFreeHost(report_);
    cudaFreeHost(plan_);
    if (planned_) {
        cudaEventDestroy(planned_);
    }
    line_.close();
}

void CudaSender::look() {
    Question question   = {};
    question.ask        = Ask::look;
    int          file   = -1;
    const Answer answer = ask(question, -1, file);
    if (answer.status != Status::ok) {
        throw ChannelError(answer.error[0] ? std::string(answer.error, strnlen(answer.error, sizeof(answer.error))) :
                                             error_);
    }
    n_slots_         = answer.n_slots;
    task_nbytes_     = answer.task_nbytes;
    result_nbytes_   = answer.result_nbytes;
    const bool sound = n_slots_ > 0 && n_slots_ <= 64 && (n_slots_ & (n_slots_ - 1)) == 0 && task_nbytes_ > line &&
                       task_nbytes_ < 1ull << 32 && task_nbytes_ % line == 0 && result_nbytes_ > line &&
                       result_nbytes_ < 1ull << 32 && result_nbytes_ % line == 0;
    if (!sound) {
        throw ChannelError("the receiver of " + path_ + " has slots that cannot be");
    }
}

void CudaSender::attach(const OpenTask & shape, Way way) {
    inbox_.reset();
    std::random_device random;
    Question           question = {};
    question.ask                = Ask::attach;
    question.epoch              = (uint64_t(random()) << 32) | random() | 1;
    question.open               = shape;
    auto outbox                 = SharedMemory::make(way, first_slot + n_slots_ * result_nbytes_);
    question.outbox             = outbox->handle();
    int          file           = -1;
    const Answer answer         = ask(question, outbox->file(), file);
    outbox_                     = std::move(outbox); // the one before is not used any more
    std::unique_ptr<SharedMemory> inbox;
    try {
        if (answer.status != Status::ok) {
            throw ChannelError(
                answer.error[0] ? std::string(answer.error, strnlen(answer.error, sizeof(answer.error))) : error_);
        }
        inbox = SharedMemory::open(answer.inbox, file);
    } catch (...) {
        if (file >= 0) {
            close(file);
        }
        throw;
    }
    if (file >= 0) {
        close(file);
    }
    inbox_ = std::move(inbox);
    if (first_slot + n_slots_ * task_nbytes_ > inbox_->handle().nbytes) {
        throw ChannelError("the receiver's memory has another size than it says");
    }
    memset(report_, 0, sizeof(*report_));
    SenderState made   = {};
    made.inbox         = inbox_->data();
    made.outbox        = outbox_->data();
    made.task_nbytes   = task_nbytes_;
    made.result_nbytes = result_nbytes_;
    made.patience      = uint64_t(options_.attach_s * 1e9);
    made.epoch         = question.epoch;
    made.report        = report_;
    made.n_slots       = n_slots_;
    made.base          = options_.base;
    check(cudaMemcpy(state_, &made, sizeof(made), cudaMemcpyHostToDevice), "set the sender up");
    check(launch_attach(state_, cudaStreamPerThread), "attach");
    check(cudaStreamSynchronize(cudaStreamPerThread), "attach");
    if (!lives()) {
        throw ChannelError(error_);
    }
    const uint64_t patience = uint64_t(options_.deadline_s * 1e9);
    check(cudaMemcpy(&state_->patience, &patience, sizeof(patience), cudaMemcpyHostToDevice), "set the deadline");
}

Answer CudaSender::ask(Question & question, int file, int & answered) {
    Answer answer    = {};
    answer.status    = Status::malformed;
    question.version = version;
    answered         = -1;
    if (!line_.give(&question, sizeof(question), file, options_.attach_s) ||
        !line_.take(&answer, sizeof(answer), answered, options_.attach_s)) {
        line_.close(); // an answer that comes late would be taken for the next one
        fail("is gone or does not answer");
        return answer;
    }
    free_nbytes_ = answer.free_nbytes;
    draining_    = answer.draining != 0;
    return answer;
}

bool CudaSender::lives() {
    if (error_.empty()) {
        const auto failure = Failure(__atomic_load_n(&report_->failure, __ATOMIC_ACQUIRE));
        if (failure != Failure::none) {
            fail(words(failure));
        } else if (!line_.lives()) {
            fail("is gone");
        }
    }
    return error_.empty();
}

void CudaSender::fail(const std::string & why) {
    give_up("the receiver of " + path_ + " " + why);
}

void CudaSender::give_up(const std::string & why) {
    if (error_.empty()) {
        error_ = why;
    }
    if (report_) {
        __atomic_store_n(&report_->abort, 1, __ATOMIC_RELEASE);
    }
}

double CudaSender::waited_s() const {
    return double(__atomic_load_n(&report_->waited, __ATOMIC_RELAXED)) * 1e-9;
}

Status CudaSender::open(const OpenTask & wanted, Handle & handle) {
    if (!lives()) {
        return Status::malformed;
    }
    Question question   = {};
    question.ask        = Ask::open;
    question.open       = wanted;
    int          file   = -1;
    const Answer answer = ask(question, -1, file);
    handle              = answer.handle;
    return answer.status;
}

Status CudaSender::reserve(Handle handle, uint32_t n_tokens) {
    return change(Ask::reserve, handle, n_tokens);
}

Status CudaSender::trim(Handle handle, uint32_t n_tokens) {
    return change(Ask::trim, handle, n_tokens);
}

Status CudaSender::change(Ask wanted, Handle handle, uint32_t n_tokens) {
    if (!lives()) {
        return Status::malformed;
    }
    Question question = {};
    question.ask      = wanted;
    question.change   = { handle, n_tokens };
    int file          = -1;
    return ask(question, -1, file).status;
}

void CudaSender::plan(const SequenceRows * rows, uint32_t n_sequences, cudaStream_t stream) {
    if (n_sequences > max_sequences) {
        throw ChannelError("a task has at most " + std::to_string(max_sequences) + " sequences, not " +
                           std::to_string(n_sequences));
    }
    check(cudaEventSynchronize(planned_), "plan an iteration");
    plan_->n_sequences = n_sequences;
    for (uint32_t i = 0, first = 0; i < n_sequences; first += rows[i++].n_rows) {
        plan_->rows[i]      = rows[i];
        plan_->first_row[i] = first;
    }
    check(cudaMemcpyAsync(&state_->plan, plan_, sizeof(*plan_), cudaMemcpyHostToDevice, stream), "plan an iteration");
    check(cudaEventRecord(planned_, stream), "plan an iteration");
}

uint32_t CudaSender::rows_of_a_task(const CudaAttention & wanted) const {
    AttendTask all    = wanted.task;
    all.n_sequences   = max_sequences;
    all.has_sinks     = wanted.sinks != nullptr;
    const size_t most = oa::weave::rows_of_a_task(all, task_nbytes_, result_nbytes_);
    if (most == 0) {
        throw ChannelError("the slots of " + path_ + " are too small for a row");
    }
    return uint32_t(std::min<size_t>(most, std::max(1u, wanted.task.n_rows)));
}

void CudaSender::send(const CudaAttention & wanted, cudaStream_t stream) {
    if (!is_aligned(wanted.q, wanted.q_stride) || !is_aligned(wanted.k, wanted.k_stride) ||
        !is_aligned(wanted.v, wanted.v_stride) || !is_aligned(wanted.out, 0)) {
        throw ChannelError("rows of q, k, v and their results lie on 16 bytes");
    }
    const uint32_t most = rows_of_a_task(wanted), in_slots = most * n_slots_;
    for (uint32_t first = 0; first < wanted.task.n_rows; first += most) {
        if (first >= in_slots) {
            fetch(wanted, first - in_slots, stream);
        }
        SendCall call    = {};
        call.task        = wanted.task;
        call.task.n_rows = std::min(most, wanted.task.n_rows - first);
        call.sinks       = wanted.sinks;
        call.q           = wanted.q;
        call.k           = wanted.k;
        call.v           = wanted.v;
        call.q_stride    = wanted.q_stride;
        call.k_stride    = wanted.k_stride;
        call.v_stride    = wanted.v_stride;
        call.first       = first;
        check(launch_send(state_, call, stream), "send rows");
    }
}

void CudaSender::receive(const CudaAttention & sent, cudaStream_t stream) {
    const uint32_t most = rows_of_a_task(sent), n_tasks = (sent.task.n_rows + most - 1) / most;
    for (uint32_t at = n_tasks - std::min(n_tasks, n_slots_); at < n_tasks; ++at) {
        fetch(sent, at * most, stream);
    }
}

// The oldest task that is not fetched yet: its rows begin at `first`.
void CudaSender::fetch(const CudaAttention & sent, uint32_t first, cudaStream_t stream) {
    const size_t    n_rows = std::min(rows_of_a_task(sent), sent.task.n_rows - first);
    const FetchCall call   = { sent.out + first * sent.out_stride(), uint32_t(n_rows * sent.out_stride()) };
    check(launch_fetch(state_, call, stream), "fetch results");
}

} // namespace oa::weave::cuda
