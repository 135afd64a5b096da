# What the patches add to ggml's libraries, and the folders of the headers that patches and hooks include by name; for the
# engine and for the small projects of bench/native and tests/native.
include(${CMAKE_CURRENT_LIST_DIR}/../cmake/cpu_targets.cmake)
set(OALLAMA_REGISTRY_SOURCES "")
if (GGML_BACKEND_DL)
    list(APPEND OALLAMA_REGISTRY_SOURCES ${OALLAMA_CSRC}/base/modules.cpp)
endif()
set(OALLAMA_BASE_SOURCES
    ${OALLAMA_CSRC}/arenas/arena.cpp
    ${OALLAMA_CSRC}/arenas/offline_offsets.cpp
    ${OALLAMA_CSRC}/base/busy_cpus.cpp
    ${OALLAMA_CSRC}/base/graph_run.cpp
    ${OALLAMA_CSRC}/base/host_memory.cpp
    ${OALLAMA_CSRC}/base/huge_pages.cpp
    ${OALLAMA_CSRC}/base/thread_team.cpp
    ${OALLAMA_CSRC}/base/thread_trial.cpp
    ${OALLAMA_CSRC}/base/thread_waits.cpp
    ${OALLAMA_CSRC}/map/tuned_limits.cpp
    ${OALLAMA_CSRC}/observe/buffer_ledger.cpp
    ${OALLAMA_CSRC}/observe/op_timer.cpp
    ${OALLAMA_CSRC}/observe/trace.cpp
    ${OALLAMA_CSRC}/ranks/ranks.cpp
    ${OALLAMA_CSRC}/segments/table_memory.cpp
    ${OALLAMA_CSRC}/stream/stream_lane.cpp
    ${OALLAMA_CSRC}/stream/stream_reader.cpp
    ${OALLAMA_CSRC}/stream/stream_source.cpp
    ${OALLAMA_CSRC}/stream/weight_stream.cpp)
set(OALLAMA_HOOK_FOLDERS "")
foreach (folder base observe stream segments arenas map attend decode products ranks weave weave/cpu weave/guests)
    list(APPEND OALLAMA_HOOK_FOLDERS ${OALLAMA_CSRC}/${folder})
endforeach()
foreach (family attend decode products weave)
    include(${OALLAMA_CSRC}/${family}/${family}.cmake)
endforeach()

# The bodies of the hooks join ggml's targets. Flags are of a file in a folder: one target stands for all of them.
function(oallama_join_ggml)
    target_sources(ggml PRIVATE ${OALLAMA_REGISTRY_SOURCES})
    target_sources(ggml-base PRIVATE ${OALLAMA_BASE_SOURCES} ${OALLAMA_WEAVE_SENDER_SOURCES})
    oallama_cpu_targets(cpus)
    foreach (cpu ${cpus})
        target_sources(${cpu} PRIVATE ${OALLAMA_WEAVE_SOURCES} ${OALLAMA_ATTEND_SOURCES} ${OALLAMA_DECODE_SOURCES}
            ${OALLAMA_PRODUCTS_SOURCES})
    endforeach()
    oallama_attend_flags(ggml)
    oallama_decode_flags(ggml)
    oallama_products_flags(ggml)
endfunction()

# A project of its own that needs the patched ggml alone, in static libraries; its options are set before.
macro(oallama_add_ggml)
    set(BUILD_SHARED_LIBS OFF)
    add_subdirectory(${OALLAMA_UPSTREAM}/ggml ggml EXCLUDE_FROM_ALL)
    foreach (target ggml ggml-base ggml-cpu)
        target_include_directories(${target} PRIVATE ${OALLAMA_HOOK_FOLDERS})
    endforeach()
    oallama_join_ggml()
endmacro()
