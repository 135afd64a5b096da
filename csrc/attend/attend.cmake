# Our attention joins ggml-cpu. Its kernels are compiled once for each instruction set and chosen at run time.
set(OALLAMA_ATTEND_SOURCES ${OALLAMA_CSRC}/attend/alone.cpp ${OALLAMA_CSRC}/attend/graph_threads.cpp
    ${OALLAMA_CSRC}/attend/own_attention.cpp ${OALLAMA_CSRC}/attend/kernels_base.cpp)
if (CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
    list(APPEND OALLAMA_ATTEND_SOURCES
        ${OALLAMA_CSRC}/attend/kernels_avx2.cpp
        ${OALLAMA_CSRC}/attend/kernels_avx512.cpp
        ${OALLAMA_CSRC}/attend/kernels_amx.cpp)
endif()

function(oallama_attend_flags target)
    if (CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
        foreach (pair base:x86-64:-mno-avx avx2:x86-64-v3:-mno-avx512f avx512:x86-64-v4:-mprefer-vector-width=512
                amx:x86-64-v4:-mprefer-vector-width=512:-mavx512bf16:-mamx-tile:-mamx-bf16)
            string(REPLACE ":" ";" more ${pair})
            list(POP_FRONT more name arch)
            set_source_files_properties(${OALLAMA_CSRC}/attend/kernels_${name}.cpp TARGET_DIRECTORY ${target}
                PROPERTIES COMPILE_OPTIONS "-march=${arch};-mtune=generic;${more}")
        endforeach()
        # GCC 12 warns of its own header's AVX-512 functions.
        set_property(SOURCE ${OALLAMA_CSRC}/attend/kernels_avx512.cpp ${OALLAMA_CSRC}/attend/kernels_amx.cpp
            TARGET_DIRECTORY ${target}
            APPEND PROPERTY COMPILE_OPTIONS -Wno-uninitialized -Wno-maybe-uninitialized)
    endif()
endfunction()
