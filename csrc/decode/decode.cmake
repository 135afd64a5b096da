# Our products with few columns join ggml-cpu. Their kernels are those of an instruction set; base has none.
set(OALLAMA_DECODE_SOURCES ${OALLAMA_CSRC}/decode/thin_products.cpp)
if (CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
    list(APPEND OALLAMA_DECODE_SOURCES
        ${OALLAMA_CSRC}/decode/kernels_avx2.cpp
        ${OALLAMA_CSRC}/decode/kernels_avx_vnni.cpp
        ${OALLAMA_CSRC}/decode/kernels_avx512.cpp)
endif()

function(oallama_decode_flags target)
    if (CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
        set(avx2 -march=x86-64-v3 -mno-avx512f -mno-avxvnni)
        set(avx_vnni -march=x86-64-v3 -mno-avx512f -mavxvnni)
        # GCC 12 warns of its own header's AVX-512 functions.
        set(avx512 -march=x86-64-v4 -mavx512vnni -mprefer-vector-width=512 -Wno-uninitialized -Wno-maybe-uninitialized)
        foreach (name avx2 avx_vnni avx512)
            set_source_files_properties(${OALLAMA_CSRC}/decode/kernels_${name}.cpp TARGET_DIRECTORY ${target}
                PROPERTIES COMPILE_OPTIONS "${${name}};-mtune=generic")
        endforeach()
    endif()
endfunction()
