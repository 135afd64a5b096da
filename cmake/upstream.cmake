# The patched llama.cpp with csrc/ joined to its targets: shared libraries, the programs used as judges, nothing else.
set(OALLAMA_TREE ${CMAKE_CURRENT_SOURCE_DIR}/third_party/llama.cpp/patched)
set(OALLAMA_CSRC ${CMAKE_CURRENT_SOURCE_DIR}/csrc)

find_package(Python3 COMPONENTS Interpreter REQUIRED)
execute_process(
    COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/third_party/llama.cpp/upstream.py prepare
    RESULT_VARIABLE prepare_status)
if (NOT prepare_status EQUAL 0)
    message(FATAL_ERROR "third_party/llama.cpp/upstream.py prepare failed")
endif()

include(llama_cpp)

# Bodies of the hooks. The patches only call them.
include(${OALLAMA_CSRC}/hooks.cmake)
set(OALLAMA_LLAMA_SOURCES
    ${OALLAMA_CSRC}/attend/attend_marks.cpp
    ${OALLAMA_CSRC}/map/backend_map.cpp
    ${OALLAMA_CSRC}/map/backend_table.cpp
    ${OALLAMA_CSRC}/map/host_weights.cpp
    ${OALLAMA_CSRC}/map/weight_marks.cpp
    ${OALLAMA_CSRC}/products/products_marks.cpp
    ${OALLAMA_CSRC}/products/twins.cpp
    ${OALLAMA_CSRC}/ranks/replay.cpp
    ${OALLAMA_CSRC}/segments/divided_experts.cpp
    ${OALLAMA_CSRC}/segments/divided_values.cpp
    ${OALLAMA_CSRC}/segments/expert_layer.cpp
    ${OALLAMA_CSRC}/segments/expert_parts.cpp
    ${OALLAMA_CSRC}/segments/expert_slots.cpp
    ${OALLAMA_CSRC}/segments/graph_rewrite.cpp
    ${OALLAMA_CSRC}/segments/model_experts.cpp
    ${OALLAMA_CSRC}/segments/parts.cpp
    ${OALLAMA_CSRC}/segments/segments.cpp
    ${OALLAMA_CSRC}/segments/slot_copier.cpp
    ${OALLAMA_CSRC}/segments/slot_policy.cpp
    ${OALLAMA_WEAVE_GUEST_SOURCES})
oallama_join_ggml()
target_sources(llama PRIVATE ${OALLAMA_LLAMA_SOURCES})
# The headers of the hooks are for our files and the patched ones. All others are compiled as upstream compiles them.
set(hooked ${OALLAMA_BASE_SOURCES} ${OALLAMA_ATTEND_SOURCES} ${OALLAMA_DECODE_SOURCES} ${OALLAMA_PRODUCTS_SOURCES}
    ${OALLAMA_WEAVE_SENDER_SOURCES} ${OALLAMA_WEAVE_SOURCES} ${OALLAMA_REGISTRY_SOURCES} ${OALLAMA_LLAMA_SOURCES})
file(GLOB patches CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/third_party/llama.cpp/patches/*.patch)
foreach (patch ${patches})
    file(STRINGS ${patch} lines REGEX "^\\+\\+\\+ b/.*\\.(c|cpp)$")
    list(TRANSFORM lines REPLACE "^\\+\\+\\+ b" ${OALLAMA_UPSTREAM})
    list(APPEND hooked ${lines})
endforeach()
list(REMOVE_DUPLICATES hooked)
set_property(SOURCE ${hooked} TARGET_DIRECTORY ggml llama PROPERTY INCLUDE_DIRECTORIES ${OALLAMA_HOOK_FOLDERS})
target_include_directories(server-context PRIVATE ${OALLAMA_CSRC}/base ${OALLAMA_CSRC}/segments ${OALLAMA_CSRC}/serve
    ${OALLAMA_CSRC}/weave ${OALLAMA_CSRC}/weave/cpu ${OALLAMA_CSRC}/weave/guests)
target_include_directories(llama-server-impl PRIVATE ${OALLAMA_CSRC}/serve)
target_sources(llama-server-impl PRIVATE ${OALLAMA_CSRC}/serve/admission.cpp ${OALLAMA_CSRC}/serve/revival.cpp)
if (TARGET ggml-rpc)
    include(${OALLAMA_CSRC}/rpc/rpc.cmake)
    if (GGML_BACKEND_DL)
        target_sources(ggml-rpc-server PRIVATE ${OALLAMA_CSRC}/rpc/rpc_program.cpp)
        target_link_libraries(ggml-rpc-server PRIVATE ${CMAKE_DL_LIBS})
    else()
        target_link_libraries(ggml-rpc-server PRIVATE ggml-rpc)
    endif()
    target_include_directories(ggml-rpc-server PRIVATE ${OALLAMA_CSRC}/rpc)
    target_include_directories(ggml-rpc PRIVATE ${OALLAMA_CSRC}/rpc ${OALLAMA_UPSTREAM}/vendor/hash ${OALLAMA_UPSTREAM}/vendor/hash/sha256)
    target_sources(ggml-rpc PRIVATE ${OALLAMA_RPC_SOURCES})
    # Other libraries of the process bring the same functions.
    set_source_files_properties(${OALLAMA_UPSTREAM}/vendor/hash/sha256/sha256.c TARGET_DIRECTORY ggml-rpc
        PROPERTIES COMPILE_OPTIONS -fvisibility=hidden)
endif()
if (GGML_VULKAN)
    target_include_directories(ggml-vulkan PRIVATE ${OALLAMA_CSRC}/base)
endif()
if (GGML_CUDA)
    target_include_directories(ggml-cuda PRIVATE ${OALLAMA_HOOK_FOLDERS} ${OALLAMA_CSRC}/weave/cuda)
    target_sources(ggml-cuda PRIVATE ${OALLAMA_CSRC}/observe/op_timer_cuda.cpp ${OALLAMA_CSRC}/segments/choices_cuda.cu
        ${OALLAMA_WEAVE_CUDA_SOURCES})
    include(cuda_runpath)
    find_package(CUDAToolkit REQUIRED)
    # Not CUDAToolkit_LIBRARY_DIR: it may be /usr/local/lib with a link to one of them.
    get_target_property(cudart CUDA::cudart IMPORTED_LOCATION)
    get_target_property(cublas CUDA::cublas IMPORTED_LOCATION)
    oallama_cuda_runpath(ggml-cuda ${cudart} ${cublas} ${NCCL_LIBRARY})
endif()

oallama_cpu_targets(cpus)
set(OALLAMA_LIBRARIES llama ggml ggml-base ${cpus})
foreach (backend cuda vulkan rpc)
    if (TARGET ggml-${backend})
        list(APPEND OALLAMA_LIBRARIES ggml-${backend})
    endif()
endforeach()
set(OALLAMA_PROGRAMS "")
if (GGML_RPC)
    list(APPEND OALLAMA_PROGRAMS ggml-rpc-server)
endif()
if (OALLAMA_TOOLS)
    list(APPEND OALLAMA_LIBRARIES mtmd llama-common)
    foreach (program llama-server llama-bench llama-perplexity llama-quantize)
        list(APPEND OALLAMA_PROGRAMS ${program})
        list(APPEND OALLAMA_LIBRARIES ${program}-impl)
    endforeach()
    # Writes tiny models of all architectures, for our tests: built with the other programs, not installed.
    add_executable(test-llama-archs ${OALLAMA_UPSTREAM}/tests/test-llama-archs.cpp)
    target_link_libraries(test-llama-archs PRIVATE llama llama-common)
    set(OALLAMA_TEST_PROGRAMS test-llama-archs)
endif()
