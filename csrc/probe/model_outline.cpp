#include "model_outline.h"

#include "gguf_keys.h"

#include <algorithm>
#include <mutex>
#include <vector>

#ifdef __linux__
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#endif

namespace {

constexpr size_t few_entries = 256; // lists of this length cost nothing, and some say what a model is
constexpr size_t max_kept    = 4;   // outlines of other models stay until their users are gone

// llama.cpp takes the number of tokens from <arch>.vocab_size where there is no vocabulary.
void drop_vocabulary(gguf_context * gguf) {
    const std::string vocab_size = oa_gguf_text(gguf, "general.architecture") + ".vocab_size";
    const int64_t     tokens     = gguf_find_key(gguf, "tokenizer.ggml.tokens");
    if (tokens >= 0 && gguf_find_key(gguf, vocab_size.c_str()) < 0) {
        gguf_set_val_u32(gguf, vocab_size.c_str(), uint32_t(gguf_get_arr_n(gguf, tokens)));
    }
    if (gguf_find_key(gguf, vocab_size.c_str()) < 0) {
        return;
    }
    std::vector<std::string> lists;
    for (int64_t i = 0; i < gguf_get_n_kv(gguf); ++i) {
        const std::string key = gguf_get_key(gguf, i);
        if (key.rfind("tokenizer.", 0) == 0 && gguf_get_kv_type(gguf, i) == GGUF_TYPE_ARRAY &&
            gguf_get_arr_n(gguf, i) > few_entries) {
            lists.push_back(key);
        }
    }
    for (const std::string & key : lists) {
        gguf_remove_key(gguf, key.c_str());
    }
    gguf_set_val_str(gguf, "tokenizer.ggml.model", "no_vocab");
}

size_t data_bytes(const gguf_context * gguf) {
    size_t end = 0;
    for (int64_t i = 0; i < gguf_get_n_tensors(gguf); ++i) {
        end = std::max(end, gguf_get_tensor_offset(gguf, i) + gguf_get_tensor_size(gguf, i));
    }
    return end;
}

// The file as it is now: one that was written anew has another outline.
std::string identity(const std::string & path) {
#ifdef __linux__
    struct stat s;
    if (stat(path.c_str(), &s) == 0) {
        std::string id = path;
        for (const long long part : { (long long) s.st_dev, (long long) s.st_ino, (long long) s.st_size,
                                      (long long) s.st_mtim.tv_sec, (long long) s.st_mtim.tv_nsec }) {
            id += " " + std::to_string(part);
        }
        return id;
    }
#endif
    return path;
}

} // namespace

oa_model_outline::oa_model_outline(const std::string & path) : path_(path) {
#ifdef __linux__
    const gguf_context_ptr gguf(gguf_init_from_file(path.c_str(), { /*no_alloc=*/true, /*ctx=*/nullptr }));
    struct stat            there;
    // A file that ends early is for llama.cpp to refuse.
    if (!gguf || oa_gguf_parts(gguf.get()) > 1 || stat(path.c_str(), &there) != 0 ||
        size_t(there.st_size) < gguf_get_data_offset(gguf.get()) + data_bytes(gguf.get())) {
        return;
    }
    drop_vocabulary(gguf.get());
    file_                  = memfd_create("oallama-outline", MFD_CLOEXEC);
    const std::string name = "/proc/self/fd/" + std::to_string(file_);
    if (file_ < 0 || !gguf_write_to_file(gguf.get(), name.c_str(), /*only_meta=*/true) ||
        ftruncate(file_, off_t(gguf_get_meta_size(gguf.get()) + data_bytes(gguf.get()))) != 0) {
        return;
    }
    path_ = name;
#endif
}

oa_model_outline::~oa_model_outline() {
#ifdef __linux__
    if (file_ >= 0) {
        close(file_);
    }
#endif
}

std::shared_ptr<const oa_model_outline> oa_model_outline::of(const std::string & path) {
    static std::mutex                                                                   mutex;
    static std::vector<std::pair<std::string, std::shared_ptr<const oa_model_outline>>> kept;

    const std::lock_guard<std::mutex> lock(mutex);
    const std::string                 id = identity(path);
    const auto found = std::find_if(kept.begin(), kept.end(), [&](const auto & entry) { return entry.first == id; });
    if (found != kept.end()) {
        std::rotate(found, found + 1, kept.end()); // used last, kept longest
        return kept.back().second;
    }
    if (kept.size() == max_kept) {
        kept.erase(kept.begin());
    }
    kept.emplace_back(id, std::make_shared<const oa_model_outline>(path));
    return kept.back().second;
}
