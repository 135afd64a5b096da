#include "conditional_cuda.h"

#include <cstdint>

#if CUDART_VERSION >= 12040

namespace oa::weave::cuda {

namespace {

struct Captured {
    cudaGraph_t             graph;
    const cudaGraphNode_t * after; // what comes next follows these
    size_t                  n_after;
    // Of those edges: a programmatic launch may have ended with others than plain ones.
    const cudaGraphEdgeData * edges;
};

cudaError_t captured(cudaStream_t stream, Captured & found) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    unsigned long long      id     = 0;
#if CUDART_VERSION >= 13000
    const cudaError_t code =
        cudaStreamGetCaptureInfo(stream, &status, &id, &found.graph, &found.after, &found.edges, &found.n_after);
#else
    const cudaError_t code =
        cudaStreamGetCaptureInfo_v3(stream, &status, &id, &found.graph, &found.after, &found.edges, &found.n_after);
#endif
    return code == cudaSuccess && status != cudaStreamCaptureStatusActive ? cudaErrorStreamCaptureInvalidated : code;
}

} // namespace

cudaError_t Conditional::open(cudaStream_t stream) {
    Captured          at   = {};
    const cudaError_t code = captured(stream, at);
    stream_                = stream;
    graph_                 = at.graph;
    return code == cudaSuccess ? cudaGraphConditionalHandleCreate(&condition_, graph_, 0, cudaGraphCondAssignDefault) :
                                 code;
}

cudaError_t Conditional::then(const cudaKernelNodeParams & body) {
    Captured    at   = {};
    cudaError_t code = captured(stream_, at);
    if (code != cudaSuccess) {
        return code;
    }
    cudaGraphNodeParams params = {};
    params.type                = cudaGraphNodeTypeConditional;
    params.conditional.handle  = condition_;
    params.conditional.type    = cudaGraphCondTypeIf;
    params.conditional.size    = 1;
    cudaGraphNode_t node = nullptr, inside = nullptr;
#if CUDART_VERSION >= 13000
    code = cudaGraphAddNode(&node, graph_, at.after, at.edges, at.n_after, &params);
#else
    code = cudaGraphAddNode_v2(&node, graph_, at.after, at.edges, at.n_after, &params);
#endif
    if (code == cudaSuccess) {
        code = cudaGraphAddKernelNode(&inside, params.conditional.phGraph_out[0], nullptr, 0, &body);
    }
    if (code == cudaSuccess) {
#if CUDART_VERSION >= 13000
        code = cudaStreamUpdateCaptureDependencies(stream_, &node, nullptr, 1, cudaStreamSetCaptureDependencies);
#else
        code = cudaStreamUpdateCaptureDependencies_v2(stream_, &node, nullptr, 1, cudaStreamSetCaptureDependencies);
#endif
    }
    return code;
}

namespace {

struct Tried {
    uint32_t wanted; // the body is to run
    uint32_t n_bodies, n_after;
};

__global__ void decide_kernel(const Tried * tried, Condition condition) {
    cudaGraphSetConditional(condition, tried->wanted);
}

__global__ void body_kernel(Tried * tried) {
    ++tried->n_bodies;
}

__global__ void after_kernel(Tried * tried) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    cudaGridDependencySynchronize();
#endif
    ++tried->n_after;
}

// What is made of a graph; let go of in the order of their members.
class Attempt {
  public:
    ~Attempt() {
        cudaGraphExecDestroy(instance_);
        cudaGraphDestroy(graph_);
        cudaFree(tried_);
        cudaStreamDestroy(stream_);
        cudaGetLastError();
    }

    cudaError_t run() {
        cudaError_t code   = cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking);
        int         device = 0, generation = 0;
        if (code == cudaSuccess) {
            code = cudaMalloc(reinterpret_cast<void **>(&tried_), sizeof(Tried));
        }
        if (code == cudaSuccess) {
            code = cudaMemset(tried_, 0, sizeof(Tried));
        }
        if (code == cudaSuccess) {
            code = cudaGetDevice(&device);
        }
        if (code == cudaSuccess) {
            code = cudaDeviceGetAttribute(&generation, cudaDevAttrComputeCapabilityMajor, device);
        }
        programmatic_ = generation >= 9;
        for (int round = 0; round < 2 && code == cudaSuccess; ++round) {
            code = capture();
            if (code == cudaSuccess && !instance_) {
                code = cudaGraphInstantiate(&instance_, graph_, 0);
            }
            if (code == cudaSuccess) {
                code = update();
            }
            for (uint32_t wanted : { 0u, 1u, 0u }) {
                code = code == cudaSuccess ? launch(wanted) : code;
            }
        }
        Tried found = {};
        if (code == cudaSuccess) {
            code = cudaMemcpyAsync(&found, tried_, sizeof(found), cudaMemcpyDeviceToHost, stream_);
        }
        if (code == cudaSuccess) {
            code = cudaStreamSynchronize(stream_);
        }
        return code == cudaSuccess && (found.n_bodies != 2 || found.n_after != 6) ? cudaErrorNotSupported : code;
    }

  private:
    cudaError_t capture() {
        if (graph_) {
            cudaGraphDestroy(graph_);
            graph_ = nullptr;
        }
        cudaError_t code = cudaStreamBeginCapture(stream_, cudaStreamCaptureModeRelaxed);
        if (code != cudaSuccess) {
            return code;
        }
        code                  = add();
        const cudaError_t end = cudaStreamEndCapture(stream_, &graph_);
        return code == cudaSuccess ? end : code;
    }

    cudaError_t add() {
        Conditional work;
        cudaError_t code = work.open(stream_);
        if (code == cudaSuccess) {
            decide_kernel<<<1, 1, 0, stream_>>>(tried_, work.condition());
            code = cudaGetLastError();
        }
        void *               arguments[] = { &tried_ };
        cudaKernelNodeParams body        = {};
        body.func                        = reinterpret_cast<void *>(body_kernel);
        body.gridDim = body.blockDim = dim3(1);
        body.kernelParams            = arguments;
        if (code == cudaSuccess) {
            code = work.then(body);
        }
        if (code != cudaSuccess) {
            return code;
        }
        cudaLaunchAttribute attribute                        = {};
        attribute.id                                         = cudaLaunchAttributeProgrammaticStreamSerialization;
        attribute.val.programmaticStreamSerializationAllowed = 1;
        cudaLaunchConfig_t config                            = {};
        config.gridDim = config.blockDim = dim3(1);
        config.stream                    = stream_;
        config.attrs                     = &attribute;
        config.numAttrs                  = programmatic_ ? 1 : 0;
        return cudaLaunchKernelEx(&config, after_kernel, tried_);
    }

    // As ggml-cuda: what cannot be updated is instantiated anew.
    cudaError_t update() {
        cudaGraphExecUpdateResultInfo info = {};
        cudaError_t                   code = cudaGraphExecUpdate(instance_, graph_, &info);
        if (code == cudaErrorGraphExecUpdateFailure) {
            cudaGetLastError();
            code      = cudaGraphExecDestroy(instance_);
            instance_ = nullptr;
            code      = code == cudaSuccess ? cudaGraphInstantiate(&instance_, graph_, 0) : code;
        }
        return code;
    }

    cudaError_t launch(uint32_t wanted) {
        cudaError_t code = cudaMemcpyAsync(&tried_->wanted, &wanted, sizeof(wanted), cudaMemcpyHostToDevice, stream_);
        code             = code == cudaSuccess ? cudaGraphLaunch(instance_, stream_) : code;
        return code == cudaSuccess ? cudaStreamSynchronize(stream_) : code;
    }

    cudaGraphExec_t instance_     = nullptr;
    cudaGraph_t     graph_        = nullptr;
    Tried *         tried_        = nullptr;
    cudaStream_t    stream_       = nullptr;
    bool            programmatic_ = false;
};

} // namespace

cudaError_t try_conditional() {
    const cudaError_t code = Attempt().run();
    cudaGetLastError();
    return code;
}

} // namespace oa::weave::cuda

#endif
