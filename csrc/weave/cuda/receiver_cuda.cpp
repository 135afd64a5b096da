#include "receiver_cuda.h"

#include "../region.h"
#include "cuda_check.h"
#include "receive_cuda.h"

#include <cstddef>
#include <cstdio>
#include <cstring>
#include <unistd.h>

namespace oa::weave::cuda {

namespace {

constexpr double nap_s    = 0.01;
constexpr double answer_s = 1.0;

template <class T> T * allocate(size_t nbytes, const char * what) {
    void * made = nullptr;
    check(cudaMalloc(&made, nbytes), what);
    check(cudaMemset(made, 0, nbytes), what);
    return static_cast<T *>(made);
}

size_t whole_lines(size_t nbytes) {
    return (nbytes + line - 1) / line * line;
}

} // namespace

CudaReceiver::CudaReceiver(const std::string & path, const CudaReceiverOptions & options) :
    options_(options), listener_(path), task_nbytes_(whole_lines(weave::line + options.task_nbytes)),
    result_nbytes_(whole_lines(weave::line + options.result_nbytes)) {
    if (options.n_slots == 0 || (options.n_slots & (options.n_slots - 1)) != 0) {
        throw ChannelError("a channel has a power of two of slots, not " + std::to_string(options.n_slots));
    }
    const OnDevice here(options_.device);
    try {
        set_up();
    } catch (...) {
        let_go();
        throw;
    }
    serving_ = std::thread([this] { serve(); });
    idling_  = std::thread([this] { idle(); });
}

void CudaReceiver::set_up() {
    check(poll_blocks(n_blocks_), "tell how many blocks fit");
    if (options_.working != Working::plain) {
        const char * why_not = "";
        conditional_         = conditional_works(why_not);
        if (!conditional_ && options_.working == Working::conditional) {
            throw ChannelError("graphs have no conditional nodes here: " + std::string(why_not));
        }
        if (!conditional_) {
            fprintf(stderr,
                    "oallama: every look launches the attention of guests, since graphs have no conditional "
                    "nodes here: %s\n",
                    why_not);
        }
    }
    const uint32_t pages_per_place = (options_.max_tokens + block_tokens - 1) / block_tokens;
    const uint32_t max_partials    = uint32_t(n_blocks_) * 4;
    ReceiverState  made            = {};
    made.pool = pool_ = allocate<char>(options_.quota_nbytes, "allocate memory for guests");
    made.pages = pages_ = allocate<uint32_t>(size_t(max_places) * pages_per_place * 4, "allocate pages");
    made.partials = partials_ = allocate<float>(max_partials * partial_floats * 4, "allocate partial results");
    made.merges = merges_ = allocate<uint32_t>(max_partials * sizeof(uint32_t), "allocate counters");
    check(cudaHostAlloc(reinterpret_cast<void **>(&words_), 4096, cudaHostAllocMapped | cudaHostAllocPortable),
          "allocate pinned memory");
    memset(words_, 0, 4096);
    made.adopted         = words_;
    made.pages_per_place = pages_per_place;
    made.max_partials    = max_partials;
    state_               = allocate<ReceiverState>(sizeof(ReceiverState), "allocate the receiver's state");
    check(cudaMemcpy(state_, &made, sizeof(made), cudaMemcpyHostToDevice), "set the receiver up");
    check(cudaStreamCreateWithFlags(&idle_stream_, cudaStreamNonBlocking), "make a stream");
    check(cudaStreamCreateWithFlags(&upload_stream_, cudaStreamNonBlocking), "make a stream");
    check(cudaEventCreateWithFlags(&ended_event_, cudaEventDisableTiming), "make an event");
    check(cudaEventCreateWithFlags(&rest_event_, cudaEventDisableTiming | cudaEventBlockingSync), "make an event");
    store_ = std::make_unique<BlockStore>(
        options_.quota_nbytes, pages_per_place,
        BlockStore::Upload{
            [this](uint32_t place, const Place & now) { upload(&state_->places[place], &now, sizeof(now)); },
            [this, pages_per_place](uint32_t place, uint32_t first, const uint32_t * pages, uint32_t n) {
                upload(pages_ + size_t(place) * pages_per_place + first, pages, n * sizeof(uint32_t));
            } });
}

CudaReceiver::~CudaReceiver() {
    ended_ = true;
    serving_.join(); // it waits for polls before it lets go of a sender's memory
    idle_ended_ = true;
    __atomic_store_n(words_ + 1, 1, __ATOMIC_RELEASE);
    changed_.notify_all();
    idling_.join();
    int before = 0;
    cudaGetDevice(&before);
    cudaSetDevice(options_.device);
    cudaDeviceSynchronize(); // polls of graphs
    let_go();
    cudaSetDevice(before);
}

void CudaReceiver::let_go() {
    for (void * memory : { static_cast<void *>(state_), static_cast<void *>(pool_), static_cast<void *>(pages_),
                           static_cast<void *>(partials_), static_cast<void *>(merges_) }) {
        cudaFree(memory);
    }
    cudaFreeHost(words_);
    for (cudaStream_t stream : { idle_stream_, upload_stream_ }) {
        if (stream) {
            cudaStreamDestroy(stream);
        }
    }
    for (cudaEvent_t event : { ended_event_, rest_event_ }) {
        if (event) {
            cudaEventDestroy(event);
        }
    }
}

void CudaReceiver::begin(cudaStream_t stream) {
    if (running_ == std::this_thread::get_id()) { // its run goes on
        distance_ = 0.0;
        if (stream != run_stream_ && !failed_) {
            check_device(cudaEventRecord(ended_event_, run_stream_), "end a graph");
            check_device(cudaStreamWaitEvent(stream, ended_event_), "follow the last graph");
        }
        run_stream_ = stream;
        return;
    }
    graphs_.lock();
    running_    = std::this_thread::get_id();
    run_stream_ = stream;
    distance_   = 0.0;
    std::unique_lock lock(mutex_);
    in_graph_ = true;
    __atomic_store_n(words_ + 1, 1, __ATOMIC_RELEASE); // a watch ends
    changed_.wait(lock, [&] { return resting_; });
    if (has_ended_event_ && !failed_) {
        check_device(cudaStreamWaitEvent(stream, ended_event_), "follow the last graph");
    }
}

// Where replayed graphs are between others their looks stay where they are: the distance is counted graph by graph.
void CudaReceiver::worked(uint32_t n_products, uint64_t n_rows, cudaStream_t stream) {
    const Distance & wanted = options_.distance;
    const double     share  = double(n_products) / (n_rows > wanted.few ? wanted.prompt : wanted.decode);
    const bool       ends   = n_products == 0 && distance_ > 0.0;
    distance_ += share;
    if (ends || distance_ > 1.0 - 1e-9) {
        distance_ = 0.0;
        look(stream);
    }
}

void CudaReceiver::look(cudaStream_t stream) {
    if (!failed_) {
        check_device(launch_poll(state_, n_blocks_, conditional_, stream), "look for guests' tasks");
    }
}

void CudaReceiver::end() {
    const cudaError_t code = cudaEventRecord(ended_event_, run_stream_);
    {
        const std::lock_guard lock(mutex_);
        has_ended_event_ = code == cudaSuccess;
        in_graph_        = false;
        __atomic_store_n(words_ + 1, 0, __ATOMIC_RELEASE);
        changed_.notify_all();
    }
    running_ = std::thread::id();
    graphs_.unlock();
    if (!failed_) {
        check_device(code, "end a graph");
    }
}

void CudaReceiver::check_device(cudaError_t code, const char * what) {
    failed_ = failed_ || code != cudaSuccess;
    check(code, what);
}

CudaReceiverStats CudaReceiver::stats() const {
    const OnDevice here(options_.device);
    uint32_t       counts[3] = {};
    static_assert(offsetof(ReceiverState, n_refused) == offsetof(ReceiverState, n_looks) + 8, "they follow each other");
    check(cudaMemcpyAsync(counts, &state_->n_looks, sizeof(counts), cudaMemcpyDeviceToHost, upload_stream_), "count");
    check(cudaStreamSynchronize(upload_stream_), "count");
    const std::lock_guard lock(mutex_);
    return { counts[0], counts[1], counts[2], n_senders_, stats_.n_sequences, stats_.free_nbytes };
}

// Lets the device look while no graph is computed. A look and the poll after it are waited for: when this thread rests,
// nothing of it is on the device.
void CudaReceiver::idle() {
    try {
        const OnDevice   here(options_.device);
        std::unique_lock lock(mutex_);
        while (!idle_ended_) {
            resting_ = true;
            changed_.notify_all();
            const bool wanted = served_ || n_setups_ != __atomic_load_n(words_, __ATOMIC_ACQUIRE);
            if (in_graph_ || !wanted) {
                changed_.wait_for(lock, std::chrono::milliseconds(10));
                continue;
            }
            if (has_ended_event_ && cudaEventQuery(ended_event_) == cudaErrorNotReady) { // that graph polls itself
                cudaGetLastError();
                changed_.wait_for(lock, std::chrono::microseconds(20));
                continue;
            }
            resting_ = false;
            lock.unlock();
            check(launch_watch(state_, options_.watch_ns, words_ + 1, idle_stream_), "wait for guests' tasks");
            check(launch_poll(state_, n_blocks_, false, idle_stream_), "look for guests' tasks");
            check(cudaEventRecord(rest_event_, idle_stream_), "compute guests' attention");
            check(cudaEventSynchronize(rest_event_), "compute guests' attention");
            lock.lock();
        }
    } catch (const ChannelError & e) {
        fprintf(stderr, "oallama: no more guests: %s\n", e.what());
        failed_ = true;
    }
    const std::lock_guard lock(mutex_);
    resting_ = true;
    changed_.notify_all();
}

// To the device, seen by polls that begin to read from now on.
void CudaReceiver::upload(void * to, const void * from, size_t nbytes) {
    check(cudaMemcpyAsync(to, from, nbytes, cudaMemcpyHostToDevice, upload_stream_), "tell the device");
    check(cudaStreamSynchronize(upload_stream_), "tell the device");
}

// Returns when no poll uses the setup before any more.
void CudaReceiver::set(Setup setup) {
    const uint32_t n = n_setups_ + 1;
    upload(&state_->setups[n % 2], &setup, sizeof(setup));
    upload(&state_->setup_number.value, &n, sizeof(n));
    {
        const std::lock_guard lock(mutex_);
        n_setups_ = n;
        served_   = setup.epoch != 0;
        changed_.notify_all();
    }
    while (__atomic_load_n(words_, __ATOMIC_ACQUIRE) != n && !failed_) {
        if (ended_) { // no poll may come any more, but those on their way
            check(cudaDeviceSynchronize(), "end the polls");
            return;
        }
        usleep(20);
    }
}

void CudaReceiver::serve() {
    try {
        const OnDevice here(options_.device);
        while (!ended_ && !failed_) {
            Line line = listener_.accept(nap_s);
            if (line.is_open()) {
                ++n_senders_;
                serve(line);
            }
        }
    } catch (const ChannelError & e) {
        fprintf(stderr, "oallama: no more guests: %s\n", e.what());
        failed_ = true;
    }
}

// One sender, until it is gone.
void CudaReceiver::serve(Line & line) {
    std::unique_ptr<SharedMemory> inbox, outbox;
    while (!ended_ && !failed_ && line.lives()) {
        Question question = {};
        int      file     = -1;
        if (!line.wait(nap_s)) {
            continue;
        }
        if (!line.take(&question, sizeof(question), file, answer_s)) {
            break;
        }
        Answer given        = answer(question, file, inbox, outbox);
        given.version       = version;
        given.free_nbytes   = store_->free_nbytes();
        given.draining      = draining_;
        given.task_nbytes   = task_nbytes_;
        given.result_nbytes = result_nbytes_;
        given.n_slots       = options_.n_slots;
        if (file >= 0) {
            close(file);
        }
        {
            const std::lock_guard lock(mutex_);
            stats_.n_sequences = store_->n_sequences();
            stats_.free_nbytes = store_->free_nbytes();
        }
        const bool has_inbox = question.ask == Ask::attach && inbox;
        if (!line.give(&given, sizeof(given), has_inbox ? inbox->file() : -1, answer_s)) {
            break;
        }
    }
    set({}); // no poll touches the sender's memory any more, before it is let go
    store_->clear();
    outbox.reset();
    if (inbox && inbox->handle().way == Way::ipc) {
        for (int i = 0; i < 100 && line.lives(); ++i) { // the sender closes first
            usleep(10000);
        }
    }
}

Answer CudaReceiver::answer(const Question & question, int file, std::unique_ptr<SharedMemory> & inbox,
                            std::unique_ptr<SharedMemory> & outbox) {
    Answer made = {};
    made.status = Status::ok;
    if (question.version != version) {
        made.status = Status::malformed;
        snprintf(made.error, sizeof(made.error), "the receiver speaks version %u of the protocol, this sender %u",
                 version, question.version);
        return made;
    }
    switch (question.ask) {
        case Ask::look: return made;
        case Ask::attach:
        case Ask::detach:
            set({});
            store_->clear();
            outbox.reset();
            inbox.reset(); // of the way before: the sender has closed it
            if (question.ask == Ask::detach) {
                return made;
            }
            try {
                OpenTask shape = question.open;
                Handle   probe = {};
                if (store_->open(shape, probe) != Status::ok) {
                    throw ChannelError("K and V of this shape are not kept on a GPU");
                }
                store_->trim(probe, 0);
                inbox  = SharedMemory::make(question.outbox.way, first_slot + options_.n_slots * task_nbytes_);
                outbox = SharedMemory::open(question.outbox, file);
                if (question.outbox.nbytes < first_slot + options_.n_slots * result_nbytes_) {
                    throw ChannelError("the sender's memory is too small for results");
                }
                Setup setup         = {};
                setup.epoch         = question.epoch;
                setup.inbox         = inbox->data();
                setup.outbox        = outbox->data();
                setup.task_nbytes   = task_nbytes_;
                setup.result_nbytes = result_nbytes_;
                setup.shape         = shape;
                setup.n_slots       = options_.n_slots;
                setup.n_pool_blocks = store_->n_blocks();
                set(setup);
                made.inbox = inbox->handle();
            } catch (const ChannelError & e) {
                made.status = Status::malformed;
                strncpy(made.error, e.what(), sizeof(made.error) - 1);
                outbox.reset();
                inbox.reset();
            }
            return made;
        case Ask::open: made.status = store_->open(question.open, made.handle); return made;
        case Ask::reserve: made.status = store_->reserve(question.change.handle, question.change.n_tokens); return made;
        case Ask::trim: made.status = store_->trim(question.change.handle, question.change.n_tokens); return made;
    }
    made.status = Status::malformed;
    return made;
}

} // namespace oa::weave::cuda
