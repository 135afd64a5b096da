# Our products join ggml-cpu. Their kernels are compiled once for each instruction set and chosen at run time.
set(OALLAMA_PRODUCTS_SOURCES
    ${OALLAMA_CSRC}/products/own_products.cpp
    ${OALLAMA_CSRC}/products/expert_choices.cpp
    ${OALLAMA_CSRC}/products/kernels_base.cpp)
if (CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
    list(APPEND OALLAMA_PRODUCTS_SOURCES
        ${OALLAMA_CSRC}/products/kernels_avx2.cpp
        ${OALLAMA_CSRC}/products/kernels_avx_vnni.cpp
        ${OALLAMA_CSRC}/products/kernels_avx512.cpp)
endif()

function(oallama_products_flags target)
    if (CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
        set(base -march=x86-64 -mno-avx)
        set(avx2 -march=x86-64-v3 -mno-avx512f -mno-avxvnni)
        set(avx_vnni -march=x86-64-v3 -mno-avx512f -mavxvnni)
        set(avx512 -march=x86-64-v4 -mavx512vnni -mprefer-vector-width=512)
        foreach (name base avx2 avx_vnni avx512)
            set_source_files_properties(${OALLAMA_CSRC}/products/kernels_${name}.cpp TARGET_DIRECTORY ${target}
                PROPERTIES COMPILE_OPTIONS "${${name}};-mtune=generic")
        endforeach()
    endif()
endfunction()
