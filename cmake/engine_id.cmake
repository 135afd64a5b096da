# What hosts of a cluster must agree on: the pin, the patches, our sources and how they are built. Not csrc/netlab, a tool
# of the tests.
get_filename_component(OALLAMA_ROOT ${CMAKE_CURRENT_LIST_DIR}/.. ABSOLUTE)

# The files that count, relative to the repository, sorted.
function(oallama_engine_files result)
    file(GLOB_RECURSE files CONFIGURE_DEPENDS LIST_DIRECTORIES false RELATIVE ${OALLAMA_ROOT}
        ${OALLAMA_ROOT}/csrc/* ${OALLAMA_ROOT}/cmake/* ${OALLAMA_ROOT}/third_party/llama.cpp/patches/*)
    list(FILTER files EXCLUDE REGEX "^csrc/netlab/")
    list(APPEND files third_party/llama.cpp/pin.json)
    list(SORT files)
    set(${result} ${files} PARENT_SCOPE)
endfunction()

# 16 hexadecimal digits of their names and contents.
function(oallama_engine_id result)
    oallama_engine_files(files)
    set(hashes "")
    foreach (path ${files})
        file(SHA256 ${OALLAMA_ROOT}/${path} hash)
        string(APPEND hashes "${hash} ${path}\n")
    endforeach()
    string(SHA256 id "${hashes}")
    string(SUBSTRING ${id} 0 16 id)
    set(${result} ${id} PARENT_SCOPE)
endfunction()
