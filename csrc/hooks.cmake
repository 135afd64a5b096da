# What the patches add to ggml-base, and the folders of the headers that patches and hooks include by name; the fuzz and
# TSan targets need the same.
set(OALLAMA_BASE_SOURCES
    ${OALLAMA_CSRC}/arenas/arena.cpp
    ${OALLAMA_CSRC}/arenas/offline_offsets.cpp
    ${OALLAMA_CSRC}/base/graph_run.cpp
    ${OALLAMA_CSRC}/base/host_memory.cpp
    ${OALLAMA_CSRC}/base/huge_pages.cpp
    ${OALLAMA_CSRC}/map/tuned_limits.cpp
    ${OALLAMA_CSRC}/observe/buffer_ledger.cpp
    ${OALLAMA_CSRC}/observe/op_timer.cpp
    ${OALLAMA_CSRC}/observe/trace.cpp
    ${OALLAMA_CSRC}/ranks/ranks.cpp
    ${OALLAMA_CSRC}/stream/stream_lane.cpp
    ${OALLAMA_CSRC}/stream/stream_reader.cpp
    ${OALLAMA_CSRC}/stream/stream_source.cpp
    ${OALLAMA_CSRC}/stream/weight_stream.cpp)
set(OALLAMA_HOOK_FOLDERS "")
foreach (folder base observe stream segments arenas map attend decode products ranks weave weave/cpu weave/guests)
    list(APPEND OALLAMA_HOOK_FOLDERS ${OALLAMA_CSRC}/${folder})
endforeach()
