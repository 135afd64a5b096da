# The patched upstream tree as a subproject: shared libraries, the programs used as judges, nothing else.
set(OALLAMA_UPSTREAM ${CMAKE_CURRENT_SOURCE_DIR}/third_party/llama.cpp/patched)
set(OALLAMA_CSRC ${CMAKE_CURRENT_SOURCE_DIR}/csrc)

find_package(Python3 COMPONENTS Interpreter REQUIRED)
execute_process(
    COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/third_party/llama.cpp/upstream.py prepare
    RESULT_VARIABLE prepare_status)
if (NOT prepare_status EQUAL 0)
    message(FATAL_ERROR "third_party/llama.cpp/upstream.py prepare failed")
endif()

if (NOT CMAKE_BUILD_TYPE)
    set(CMAKE_BUILD_TYPE Release CACHE STRING "" FORCE)
endif()
set(BUILD_SHARED_LIBS ON CACHE BOOL "" FORCE)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
set(CMAKE_LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
# Libraries and programs find each other wherever the wheel is unpacked.
set(CMAKE_BUILD_WITH_INSTALL_RPATH ON)
set(CMAKE_INSTALL_RPATH "$ORIGIN;$ORIGIN/../lib")

# Otherwise upstream asks git, which answers with our own commit: every commit would rebuild.
set(LLAMA_BUILD_NUMBER 0)
file(READ ${CMAKE_CURRENT_SOURCE_DIR}/third_party/llama.cpp/pin.json pin)
string(JSON LLAMA_BUILD_COMMIT GET ${pin} llama_cpp_commit)
set(GIT_EXE false CACHE STRING "" FORCE)

set(LLAMA_BUILD_COMMON   ON  CACHE BOOL "" FORCE)
set(LLAMA_BUILD_TOOLS    ON  CACHE BOOL "" FORCE)
set(LLAMA_BUILD_SERVER   ON  CACHE BOOL "" FORCE)
set(LLAMA_BUILD_TESTS    OFF CACHE BOOL "" FORCE)
set(LLAMA_BUILD_EXAMPLES OFF CACHE BOOL "" FORCE)
set(LLAMA_BUILD_APP      OFF CACHE BOOL "" FORCE)
set(LLAMA_BUILD_UI       OFF CACHE BOOL "" FORCE)
set(LLAMA_USE_PREBUILT_UI OFF CACHE BOOL "" FORCE)
set(LLAMA_OPENSSL        OFF CACHE BOOL "" FORCE)

add_subdirectory(${OALLAMA_UPSTREAM} upstream EXCLUDE_FROM_ALL)

# Bodies of the hooks. The patches only call them.
include(${OALLAMA_CSRC}/hooks.cmake)
target_include_directories(ggml-base PRIVATE ${OALLAMA_HOOK_FOLDERS})
target_sources(ggml-base PRIVATE ${OALLAMA_BASE_SOURCES})
target_include_directories(ggml-cpu PRIVATE ${OALLAMA_HOOK_FOLDERS})
include(${OALLAMA_CSRC}/weave/weave.cmake)
target_sources(ggml-cpu PRIVATE ${OALLAMA_WEAVE_SOURCES})
target_compile_options(ggml-cpu PRIVATE "SHELL:-include ${CMAKE_CURRENT_SOURCE_DIR}/cmake/amx_tile_config.h")
target_include_directories(llama PRIVATE ${OALLAMA_HOOK_FOLDERS})
target_sources(llama PRIVATE
    ${OALLAMA_CSRC}/map/backend_map.cpp
    ${OALLAMA_CSRC}/map/backend_table.cpp
    ${OALLAMA_CSRC}/map/host_weights.cpp
    ${OALLAMA_CSRC}/map/weight_marks.cpp
    ${OALLAMA_CSRC}/ranks/replay.cpp
    ${OALLAMA_CSRC}/segments/segments.cpp
    ${OALLAMA_CSRC}/segments/segments_graph.cpp
    ${OALLAMA_WEAVE_GUEST_SOURCES})
set_source_files_properties(${OALLAMA_WEAVE_GUEST_SOURCES} TARGET_DIRECTORY llama PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
target_include_directories(server-context PRIVATE ${OALLAMA_CSRC}/serve ${OALLAMA_CSRC}/weave/guests)
target_include_directories(llama-server-impl PRIVATE ${OALLAMA_CSRC}/serve)
target_sources(llama-server-impl PRIVATE ${OALLAMA_CSRC}/serve/admission.cpp)
if (TARGET ggml-rpc)
    include(${OALLAMA_CSRC}/rpc/rpc.cmake)
    target_include_directories(ggml-rpc PUBLIC $<BUILD_INTERFACE:${OALLAMA_CSRC}/rpc>)
    target_include_directories(ggml-rpc PRIVATE ${OALLAMA_UPSTREAM}/vendor/hash ${OALLAMA_UPSTREAM}/vendor/hash/sha256)
    target_sources(ggml-rpc PRIVATE ${OALLAMA_RPC_SOURCES})
    # Other libraries of the process bring the same functions.
    set_source_files_properties(${OALLAMA_UPSTREAM}/vendor/hash/sha256/sha256.c TARGET_DIRECTORY ggml-rpc
        PROPERTIES COMPILE_OPTIONS -fvisibility=hidden)
endif()
if (GGML_CUDA)
    target_include_directories(ggml-cuda PRIVATE ${OALLAMA_HOOK_FOLDERS} ${OALLAMA_CSRC}/weave/cuda)
    target_sources(ggml-cuda PRIVATE ${OALLAMA_CSRC}/observe/op_timer_cuda.cpp ${OALLAMA_WEAVE_CUDA_SOURCES})
    include(cuda_runpath)
    find_package(CUDAToolkit REQUIRED)
    # Not CUDAToolkit_LIBRARY_DIR: it may be /usr/local/lib with a link to one of them.
    get_target_property(cudart CUDA::cudart IMPORTED_LOCATION)
    get_target_property(cublas CUDA::cublas IMPORTED_LOCATION)
    oallama_cuda_runpath(ggml-cuda ${cudart} ${cublas} ${NCCL_LIBRARY})
endif()

set(OALLAMA_PROGRAMS llama-server llama-bench llama-perplexity llama-quantize)
set(OALLAMA_LIBRARIES llama ggml ggml-base ggml-cpu mtmd llama-common)
foreach (program ${OALLAMA_PROGRAMS})
    list(APPEND OALLAMA_LIBRARIES ${program}-impl)
endforeach()
foreach (backend cuda vulkan rpc)
    if (TARGET ggml-${backend})
        list(APPEND OALLAMA_LIBRARIES ggml-${backend})
    endif()
endforeach()
if (GGML_RPC)
    list(APPEND OALLAMA_PROGRAMS ggml-rpc-server)
endif()
