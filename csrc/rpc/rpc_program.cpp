// ggml-rpc-server where the RPC backend is a module: it is loaded before the registry is asked, which touches devices.
#include "ggml-backend.h"
#include "rpc_hooks.h"

#include <cstdio>
#include <dlfcn.h>
#include <string>

extern "C" int oa_rpc_server_main(int * argc, char ** argv) {
    Dl_info about = {};
    dladdr(reinterpret_cast<void *>(&ggml_backend_reg_count), &about);
    const std::string libggml = about.dli_fname ? about.dli_fname : "";
    const std::string module  = libggml.substr(0, libggml.rfind('/') + 1) + "libggml-rpc.so";
    void * const      handle  = dlopen(module.c_str(), RTLD_NOW | RTLD_LOCAL);
    void * const      found   = handle ? dlsym(handle, "oa_rpc_server_main") : nullptr;
    if (!found) {
        std::fprintf(stderr, "ggml-rpc-server: error: cannot load %s: %s\n", module.c_str(), dlerror());
        return 1;
    }
    return reinterpret_cast<decltype(&oa_rpc_server_main)>(found)(argc, argv);
}
