# The CPU backends: ggml-cpu, or one module per instruction set.
function(oallama_cpu_targets result)
    get_property(targets DIRECTORY ${OALLAMA_UPSTREAM}/ggml/src PROPERTY BUILDSYSTEM_TARGETS)
    list(FILTER targets INCLUDE REGEX "^ggml-cpu")
    list(FILTER targets EXCLUDE REGEX "-feats$")
    set(${result} ${targets} PARENT_SCOPE)
endfunction()
