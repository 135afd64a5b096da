# Our products with few columns join ggml-cpu. There are kernels for AVX-512 with VNNI only.
set(OALLAMA_DECODE_SOURCES ${OALLAMA_CSRC}/decode/thin_products.cpp)
if (CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
    list(APPEND OALLAMA_DECODE_SOURCES ${OALLAMA_CSRC}/decode/kernels_avx512.cpp)
endif()

function(oallama_decode_flags target)
    if (CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
        # GCC 12 warns of its own header's AVX-512 functions.
        set(options -march=x86-64-v4 -mavx512vnni -mprefer-vector-width=512 -mtune=generic -Wno-uninitialized
            -Wno-maybe-uninitialized)
        set_source_files_properties(${OALLAMA_CSRC}/decode/kernels_avx512.cpp TARGET_DIRECTORY ${target}
            PROPERTIES COMPILE_OPTIONS "${options}")
    endif()
endfunction()
