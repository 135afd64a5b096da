// CUDA without a GPU, as far as the hosts of csrc/weave/cuda use it: memory is the host's, a launch runs its blocks as
// threads (weave_cuda_threads.h) and returns when it is done, what is captured runs when its graph is launched. With it
// tests/weave/test_weave_cuda.py runs on any machine that has CUDA's headers.
//
// OALLAMA_FAKE_WAYS: what works: "mapped" (memfds to share memory), "host", "conditional"; the default is all of it.
#include "receive_cuda.h"
#include "send_cuda.h"
#include "weave_cuda_threads.h"

#include <cstring>
#include <cuda.h>
#include <cuda_runtime.h>
#include <functional>
#include <sys/mman.h>

using namespace oa::weave::cuda;

namespace {

using PollMemory = Shared<2 * max_width>;
using Operation  = std::function<void()>;

constexpr int n_poll_blocks = 3;

std::atomic<unsigned> seed{ 1 };

double now_s() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

bool works(const char * way) {
    const char * given = getenv("OALLAMA_FAKE_WAYS");
    return std::string(given ? given : "mapped host conditional").find(way) != std::string::npos;
}

} // namespace

// What CUDA's handles point to.
struct CUstream_st {
    bool                   captures = false;
    std::vector<Operation> operations;
};

struct CUevent_st {
    double at = 0.0;
};

struct CUgraph_st {
    std::vector<Operation> operations;
};

struct CUgraphExec_st {
    std::vector<Operation> operations;
};

namespace {

bool is_own(cudaStream_t stream) {
    return stream != nullptr && stream != cudaStreamPerThread;
}

cudaError_t enqueue(cudaStream_t stream, Operation operation) {
    if (is_own(stream) && stream->captures) {
        stream->operations.push_back(std::move(operation));
    } else {
        operation();
    }
    return cudaSuccess;
}

template <class Kernel> cudaError_t send_launch(SenderState * state, int n_blocks, cudaStream_t stream, Kernel kernel) {
    return enqueue(stream, [=] {
        launch<SendShared>(n_blocks, 2, 1, ++seed, [&](auto & block) {
            Send<TwinBlock<SendShared>> send(block, *state);
            kernel(send);
        });
    });
}

using PollBlock = TwinBlock<PollMemory>;

std::atomic<uint32_t> n_looks{ 0 }, n_works{ 0 }, n_waits{ 0 };

void look(ReceiverState * state) {
    ++n_looks;
    launch<PollMemory>(1, 1, 1, ++seed, [&](auto & block) { Look<PollBlock, TwinRules>(block, *state).look(); });
}

void work(ReceiverState * state, int n_blocks) {
    ++n_works;
    launch<PollMemory>(n_blocks, 2, 2, ++seed, [&](auto & block) { Work<PollBlock, TwinRules>(block, *state).run(); });
}

} // namespace

namespace oa::weave::cuda {

cudaError_t poll_blocks(int & n_blocks) {
    n_blocks = n_poll_blocks;
    return cudaSuccess;
}

bool conditional_works(const char *& why_not) {
    why_not = "not in this fake";
    return works("conditional");
}

cudaError_t launch_poll(ReceiverState * state, int n_blocks, bool conditional, cudaStream_t stream) {
    conditional = conditional && stream->captures;
    return enqueue(stream, [=] {
        look(state);
        if (!conditional || state->is_open.value != 0) {
            work(state, n_blocks);
        }
    });
}

cudaError_t launch_watch(ReceiverState * state, uint64_t patience, const uint32_t * stop, cudaStream_t stream) {
    return enqueue(stream, [=] {
        launch<PollMemory>(1, 1, 1, ++seed,
                           [&](auto & block) { Look<PollBlock, TwinRules>(block, *state).watch(patience, stop); });
    });
}

cudaError_t launch_busy(uint64_t ns, cudaStream_t stream) {
    return enqueue(stream, [=] { usleep(useconds_t(ns / 1000)); });
}

cudaError_t launch_attach(SenderState * state, cudaStream_t stream) {
    send_launch(state, 1, stream, [](auto & send) { send.attach(); });
    send_launch(state, 1, stream, [](auto & send) { send.await_accepted(); });
    send_launch(state, 1, stream, [](auto & send) { send.ping(); });
    send_launch(state, 1, stream, [](auto & send) { send.await_result(send.ping_answer()); });
    return send_launch(state, 1, stream, [](auto & send) { send.check_ping(); });
}

cudaError_t launch_send(SenderState * state, const SendCall & call, cudaStream_t stream) {
    return send_launch(state, 3, stream, [=](auto & send) { send.send(call); });
}

cudaError_t launch_fetch(SenderState * state, const FetchCall & call, cudaStream_t stream) {
    send_launch(state, 1, stream, [=](auto & send) { send.await_result(call.n_floats * uint32_t(sizeof(float))); });
    return send_launch(state, 2, stream, [=](auto & send) { send.fetch(call); });
}

} // namespace oa::weave::cuda

extern "C" {

// Since the process began: looks, works; how often a stream was told to wait for another one.
void fake_counts(uint32_t counts[3]) {
    counts[0] = n_looks;
    counts[1] = n_works;
    counts[2] = n_waits;
}

cudaError_t cudaMalloc(void ** memory, size_t nbytes) {
    *memory = aligned_alloc(256, (nbytes + 255) / 256 * 256);
    return *memory ? cudaSuccess : cudaErrorMemoryAllocation;
}

cudaError_t cudaFree(void * memory) {
    free(memory);
    return cudaSuccess;
}

cudaError_t cudaHostAlloc(void ** memory, size_t nbytes, unsigned) {
    return cudaMalloc(memory, nbytes);
}

cudaError_t cudaFreeHost(void * memory) {
    return cudaFree(memory);
}

cudaError_t cudaMemset(void * memory, int value, size_t nbytes) {
    memset(memory, value, nbytes);
    return cudaSuccess;
}

// Small words one by one, as polls may read them meanwhile.
cudaError_t cudaMemcpy(void * to, const void * from, size_t nbytes, cudaMemcpyKind) {
    __atomic_thread_fence(__ATOMIC_RELEASE);
    if (nbytes % sizeof(uint32_t) == 0 && reinterpret_cast<uintptr_t>(to) % sizeof(uint32_t) == 0) {
        for (size_t i = 0; i < nbytes / sizeof(uint32_t); ++i) {
            uint32_t word;
            memcpy(&word, static_cast<const char *>(from) + i * sizeof(word), sizeof(word));
            __atomic_store_n(static_cast<uint32_t *>(to) + i, word, __ATOMIC_RELEASE);
        }
    } else {
        memcpy(to, from, nbytes);
    }
    return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void * to, const void * from, size_t nbytes, cudaMemcpyKind kind, cudaStream_t stream) {
    return enqueue(stream, [=] { cudaMemcpy(to, from, nbytes, kind); });
}

cudaError_t cudaHostRegister(void *, size_t, unsigned) {
    return works("host") ? cudaSuccess : cudaErrorNotSupported;
}

cudaError_t cudaHostUnregister(void *) {
    return cudaSuccess;
}

cudaError_t cudaHostGetDevicePointer(void ** device, void * host, unsigned) {
    *device = host;
    return cudaSuccess;
}

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *, void *) {
    return cudaErrorNotSupported;
}

cudaError_t cudaIpcOpenMemHandle(void **, cudaIpcMemHandle_t, unsigned) {
    return cudaErrorNotSupported;
}

cudaError_t cudaIpcCloseMemHandle(void *) {
    return cudaSuccess;
}

cudaError_t cudaGetDevice(int * device) {
    *device = 0;
    return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int * count) {
    *count = 1;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
    return device == 0 ? cudaSuccess : cudaErrorInvalidDevice;
}

cudaError_t cudaDeviceSynchronize() {
    return cudaSuccess;
}

cudaError_t cudaGetLastError() {
    return cudaSuccess;
}

const char * cudaGetErrorString(cudaError_t) {
    return "not in this fake";
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t * stream, unsigned) {
    *stream = new CUstream_st;
    return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    delete stream;
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t) {
    return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) {
    ++n_waits;
    return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
    stream->captures = true;
    return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t * graph) {
    *graph           = new CUgraph_st{ std::move(stream->operations) };
    stream->captures = false;
    stream->operations.clear();
    return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t * made, cudaGraph_t graph, unsigned long long) {
    *made = new CUgraphExec_st{ graph->operations };
    return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t) {
    for (const Operation & operation : graph->operations) {
        operation();
    }
    return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    delete graph;
    return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) {
    delete graph;
    return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t * event) {
    *event = new CUevent_st;
    return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t * event, unsigned) {
    return cudaEventCreate(event);
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
    delete event;
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    return enqueue(stream, [=] { event->at = now_s(); });
}

cudaError_t cudaEventQuery(cudaEvent_t) {
    return cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t) {
    return cudaSuccess;
}

cudaError_t cudaEventElapsedTime(float * ms, cudaEvent_t first, cudaEvent_t last) {
    *ms = float((last->at - first->at) * 1e3);
    return cudaSuccess;
}

CUresult cuGetErrorString(CUresult, const char ** text) {
    *text = "not in this fake";
    return CUDA_SUCCESS;
}

CUresult cuMemGetAllocationGranularity(size_t * nbytes, const CUmemAllocationProp *, CUmemAllocationGranularity_flags) {
    *nbytes = size_t(2) << 20;
    return works("mapped") ? CUDA_SUCCESS : CUDA_ERROR_NOT_SUPPORTED;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle * made, size_t nbytes, const CUmemAllocationProp *,
                     unsigned long long) {
    const int file = memfd_create("oallama-fake-gpu", MFD_CLOEXEC);
    *made          = CUmemGenericAllocationHandle(file);
    return file >= 0 && ftruncate(file, off_t(nbytes)) == 0 ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuMemExportToShareableHandle(void * file, CUmemGenericAllocationHandle memory, CUmemAllocationHandleType,
                                      unsigned long long) {
    *static_cast<int *>(file) = dup(int(memory));
    return CUDA_SUCCESS;
}

CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle * made, void * file, CUmemAllocationHandleType) {
    *made = CUmemGenericAllocationHandle(dup(int(reinterpret_cast<intptr_t>(file))));
    return CUDA_SUCCESS;
}

CUresult cuMemAddressReserve(CUdeviceptr * at, size_t nbytes, size_t, CUdeviceptr, unsigned long long) {
    *at = CUdeviceptr(mmap(nullptr, nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    return CUDA_SUCCESS;
}

CUresult cuMemMap(CUdeviceptr at, size_t nbytes, size_t, CUmemGenericAllocationHandle memory, unsigned long long) {
    void * there = reinterpret_cast<void *>(at);
    return mmap(there, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, int(memory), 0) == there ?
               CUDA_SUCCESS :
               CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemSetAccess(CUdeviceptr, size_t, const CUmemAccessDesc *, size_t) {
    return CUDA_SUCCESS;
}

CUresult cuMemUnmap(CUdeviceptr at, size_t nbytes) {
    mmap(reinterpret_cast<void *>(at), nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    return CUDA_SUCCESS;
}

CUresult cuMemAddressFree(CUdeviceptr at, size_t nbytes) {
    munmap(reinterpret_cast<void *>(at), nbytes);
    return CUDA_SUCCESS;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle memory) {
    close(int(memory));
    return CUDA_SUCCESS;
}
}
