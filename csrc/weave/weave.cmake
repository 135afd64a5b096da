# Both sides of a channel join ggml-cpu, whose attention the receiver calls, those on a GPU ggml-cuda; the hot model's
# cache and graph join llama.
set(OALLAMA_WEAVE_SOURCES
    ${OALLAMA_CSRC}/base/futex.cpp
    ${OALLAMA_CSRC}/weave/cpu/attention.cpp
    ${OALLAMA_CSRC}/weave/cpu/receiver.cpp
    ${OALLAMA_CSRC}/weave/cpu/receiver_of_process.cpp
    ${OALLAMA_CSRC}/weave/cpu/sender.cpp
    ${OALLAMA_CSRC}/weave/cpu/store.cpp
    ${OALLAMA_CSRC}/weave/region.cpp)
set(OALLAMA_WEAVE_GUEST_SOURCES
    ${OALLAMA_CSRC}/weave/guests/guest_cache.cpp
    ${OALLAMA_CSRC}/weave/guests/guest_channels.cpp
    ${OALLAMA_CSRC}/weave/guests/guest_context.cpp
    ${OALLAMA_CSRC}/weave/guests/guest_decode.cpp
    ${OALLAMA_CSRC}/weave/guests/guest_graph.cpp)
set(OALLAMA_WEAVE_CUDA_SOURCES
    ${OALLAMA_CSRC}/weave/cuda/block_store.cpp
    ${OALLAMA_CSRC}/weave/cuda/conditional_cuda.cu
    ${OALLAMA_CSRC}/weave/cuda/control.cpp
    ${OALLAMA_CSRC}/weave/cuda/guest_ops_cuda.cpp
    ${OALLAMA_CSRC}/weave/cuda/receive_cuda.cu
    ${OALLAMA_CSRC}/weave/cuda/receiver_cuda.cpp
    ${OALLAMA_CSRC}/weave/cuda/receiver_of_process_cuda.cpp
    ${OALLAMA_CSRC}/weave/cuda/send_cuda.cu
    ${OALLAMA_CSRC}/weave/cuda/sender_cuda.cpp
    ${OALLAMA_CSRC}/weave/cuda/shared_memory_cuda.cpp)
