// Functions of ours in ggml's CPU backend, which callers outside of it find by name: the backend may be a module that
// was loaded for this CPU (docs/wheels.md), which nobody can link. weave/cpu/cpu_functions.cpp lists them.
#pragma once

#include "ggml-backend.h"

// The function of that name; null if the CPU backend has none. Inside of the backend.
void * oa_cpu_function(const char * name);

// The same outside of it. Aborts where there is none: then the backend is of another build.
inline void * oa_function_of_cpu(const char * name) {
    ggml_backend_dev_t const cpu = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    void * const found = cpu ? ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(cpu), name) : nullptr;
    GGML_ASSERT(found && "the CPU backend is missing, or of another build of oallama");
    return found;
}

// OA_OF_CPU(function)(arguments): `function` has to be declared.
#define OA_OF_CPU(function)                                                                                            \
    ([] {                                                                                                              \
        static auto * const found = reinterpret_cast<decltype(function) *>(oa_function_of_cpu(#function));             \
        return found;                                                                                                  \
    }())
