# Where a library in oallama/lib of a site-packages, or in a package's folder of modules, looks for ggml's and CUDA's:
# beside itself, in oallama/lib, in the nvidia-* wheels of the same site-packages (those of CUDA 13 share one folder, those of CUDA 12 have one each), then where `libraries`, the files
# it is linked with, lie on this machine.

function(oallama_cuda_runpath target)
    set(folders ${CMAKE_INSTALL_RPATH} "$ORIGIN/../../oallama/lib")
    foreach (wheel cu13 cuda_runtime cublas nccl)
        list(APPEND folders "$ORIGIN/../../nvidia/${wheel}/lib")
    endforeach()
    foreach (library ${ARGN})
        get_filename_component(folder "${library}" DIRECTORY)
        list(APPEND folders "${folder}")
    endforeach()
    list(REMOVE_DUPLICATES folders)
    set_target_properties(${target} PROPERTIES INSTALL_RPATH "${folders}")
endfunction()
