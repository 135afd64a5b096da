# llama.cpp as a subproject, for the engine (patched) and for the baseline (not). Both see the same options and, from
# their build folders, the same paths: ccache then gives one build what the other has compiled.
#   include(llama_cpp) with OALLAMA_TREE: folder of the source. Then OALLAMA_UPSTREAM is what to name its files by.
if (NOT CMAKE_BUILD_TYPE)
    set(CMAKE_BUILD_TYPE Release CACHE STRING "" FORCE)
endif()
set(BUILD_SHARED_LIBS ON CACHE BOOL "" FORCE)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
set(CMAKE_LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
# Libraries and programs find each other wherever they are unpacked.
set(CMAKE_BUILD_WITH_INSTALL_RPATH ON)
set(CMAKE_INSTALL_RPATH "$ORIGIN;$ORIGIN/../lib")
set(CMAKE_UNITY_BUILD_RELOCATABLE ON)

find_program(CCACHE ccache)
if (CCACHE)
    foreach (lang C CXX CUDA)
        set(CMAKE_${lang}_COMPILER_LAUNCHER ${CCACHE} CACHE STRING "")
    endforeach()
endif()
set(GGML_CCACHE OFF CACHE BOOL "" FORCE) # ours is set above

# Otherwise upstream asks git, which answers with our own commit: every commit would rebuild.
set(LLAMA_BUILD_NUMBER 0)
file(READ ${CMAKE_CURRENT_LIST_DIR}/../third_party/llama.cpp/pin.json pin)
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

set(OALLAMA_UPSTREAM ${CMAKE_BINARY_DIR}/llama.cpp)
file(CREATE_LINK ${OALLAMA_TREE} ${OALLAMA_UPSTREAM} SYMBOLIC)
add_subdirectory(${OALLAMA_UPSTREAM} upstream EXCLUDE_FROM_ALL)

# Only ggml's own registry asks which backends there are: another one recompiles nothing else.
get_target_property(definitions ggml INTERFACE_COMPILE_DEFINITIONS)
list(FILTER definitions EXCLUDE REGEX "^GGML_USE_")
set_property(TARGET ggml PROPERTY INTERFACE_COMPILE_DEFINITIONS ${definitions})

include(${CMAKE_CURRENT_LIST_DIR}/cpu_targets.cmake)
oallama_cpu_targets(cpus)
foreach (cpu ${cpus})
    target_compile_options(${cpu} PRIVATE "SHELL:-include ${CMAKE_CURRENT_LIST_DIR}/amx_tile_config.h")
endforeach()
