# What goes into the wheel, all below oallama/.

foreach (target ${OALLAMA_LIBRARIES})
    # A wheel holds no symbolic links: versioned names would be stored as copies.
    set_property(TARGET ${target} PROPERTY VERSION)
    set_property(TARGET ${target} PROPERTY SOVERSION)
endforeach()

add_custom_target(oallama-engine ALL DEPENDS ${OALLAMA_LIBRARIES} ${OALLAMA_PROGRAMS} ${OALLAMA_TEST_PROGRAMS})

foreach (target ${OALLAMA_LIBRARIES})
    install(PROGRAMS $<TARGET_FILE:${target}> DESTINATION oallama/lib COMPONENT oallama)
endforeach()
foreach (target ${OALLAMA_PROGRAMS})
    install(PROGRAMS $<TARGET_FILE:${target}> DESTINATION oallama/bin COMPONENT oallama)
endforeach()
install(TARGETS _core LIBRARY DESTINATION oallama COMPONENT oallama)
if (OALLAMA_COMM)
    install(TARGETS _comm LIBRARY DESTINATION oallama COMPONENT oallama)
    install(TARGETS oallama_comm oallama_ranks oallama_loopback LIBRARY DESTINATION oallama/lib COMPONENT oallama)
endif()

# The module llama_cpp: its C API must match the pinned llama.cpp.
install(DIRECTORY ${OALLAMA_UPSTREAM}/python/ DESTINATION oallama/bindings COMPONENT oallama)

# By which a package with a backend of its own (packages/) knows the engine that it was made for.
include(engine_id)
oallama_engine_id(engine_id)
file(GENERATE OUTPUT ${CMAKE_BINARY_DIR}/engine_id CONTENT "${engine_id}\n")
install(FILES ${CMAKE_BINARY_DIR}/engine_id DESTINATION oallama COMPONENT oallama)
if (GGML_CUDA AND GGML_BACKEND_DL)
    set(cuda_package oallama_cuda${CUDAToolkit_VERSION_MAJOR}/modules)
    install(PROGRAMS $<TARGET_FILE:ggml-cuda> DESTINATION ${cuda_package} COMPONENT cuda)
    install(FILES ${CMAKE_BINARY_DIR}/engine_id DESTINATION ${cuda_package} COMPONENT cuda)
    install(FILES ${OALLAMA_UPSTREAM}/LICENSE DESTINATION ${cuda_package} RENAME LICENSE-llama.cpp COMPONENT cuda)
endif()

include(licences)

# The tokenizers of the model maker.
file(GLOB vocabularies ${OALLAMA_UPSTREAM}/models/ggml-vocab-*.gguf)
install(FILES ${vocabularies} DESTINATION oallama/vocab COMPONENT oallama)
install(FILES ${PROJECT_SOURCE_DIR}/third_party/llama.cpp/pin.json DESTINATION oallama COMPONENT oallama)
