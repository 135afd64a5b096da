# What the patches add to ggml-base; the fuzz targets need the same.
set(OALLAMA_BASE_SOURCES
    ${OALLAMA_CSRC}/engine/arena.cpp
    ${OALLAMA_CSRC}/engine/buffer_ledger.cpp
    ${OALLAMA_CSRC}/engine/graph_run.cpp
    ${OALLAMA_CSRC}/engine/host_memory.cpp
    ${OALLAMA_CSRC}/engine/offline_offsets.cpp
    ${OALLAMA_CSRC}/engine/op_timer.cpp
    ${OALLAMA_CSRC}/engine/ranks.cpp
    ${OALLAMA_CSRC}/engine/stream_lane.cpp
    ${OALLAMA_CSRC}/engine/stream_reader.cpp
    ${OALLAMA_CSRC}/engine/stream_source.cpp
    ${OALLAMA_CSRC}/engine/trace.cpp
    ${OALLAMA_CSRC}/engine/tuned_limits.cpp
    ${OALLAMA_CSRC}/engine/weight_stream.cpp)
