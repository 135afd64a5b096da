# Our kernels by several threads, for the sanitizer of the including project (scripts/sanitize_kernels.sh).
foreach (family attend products decode)
    add_executable(${family}_threads ${CMAKE_CURRENT_LIST_DIR}/${family}_threads.cpp)
    target_compile_features(${family}_threads PRIVATE cxx_std_17)
    target_include_directories(${family}_threads PRIVATE ${OALLAMA_HOOK_FOLDERS})
    target_link_libraries(${family}_threads PRIVATE ggml-cpu ggml-base)
    target_link_options(${family}_threads PRIVATE -Wl,--wrap=ggml_barrier)
endforeach()
