#include "modules.h"

#include "ggml-backend.h"

#include <cstdlib>
#include <dlfcn.h>
#include <mutex>
#include <sstream>
#include <string>

namespace {

std::string folder_of_libggml() {
    Dl_info about = {};
    dladdr(reinterpret_cast<void *>(&ggml_backend_load_all_from_path), &about);
    const std::string path = about.dli_fname ? about.dli_fname : "";
    return path.substr(0, path.rfind('/'));
}

// ggml also loads GGML_BACKEND_PATH, after each folder: what has been loaded before stays what it is.
void load() {
    ggml_backend_load_all_from_path(folder_of_libggml().c_str());
    const char *       given = std::getenv("OALLAMA_MODULES");
    std::istringstream more(given ? given : "");
    for (std::string folder; std::getline(more, folder, ':');) {
        if (!folder.empty()) { // ggml takes an empty one for the current folder
            ggml_backend_load_all_from_path(folder.c_str());
        }
    }
}

} // namespace

bool oa_load_modules() {
    static std::once_flag    once;
    static thread_local bool loading = false; // loading asks the registry, which calls this
    if (!loading) {
        std::call_once(once, [] {
            loading = true;
            load();
            loading = false;
        });
    }
    return true;
}
