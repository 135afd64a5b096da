#include "chosen_experts.h"

#include <cstdlib>
#include <cstring>
#include <utility>

namespace {

constexpr char prefix[] = "ffn_moe_topk-";

// The layer of a tensor of chosen experts; -1 for any other. Views and copies of one have more behind the number.
int layer_of(const ggml_tensor * tensor) {
    if (std::strncmp(tensor->name, prefix, sizeof(prefix) - 1) != 0 || tensor->type != GGML_TYPE_I32) {
        return -1;
    }
    const char * digits = tensor->name + sizeof(prefix) - 1;
    char *       end    = nullptr;
    const long   layer  = std::strtol(digits, &end, 10);
    return end != digits && *end == '\0' && layer >= 0 ? int(layer) : -1;
}

oa_chosen_experts read(const ggml_tensor * tensor, int layer) {
    std::vector<char> bytes(ggml_nbytes(tensor)); // of all rows, with what lies between them
    ggml_backend_tensor_get(tensor, bytes.data(), 0, bytes.size());

    oa_chosen_experts chosen{ layer, tensor->ne[0], tensor->ne[1], {} };
    chosen.ids.resize(size_t(chosen.n_used * chosen.n_tokens));
    for (int64_t token = 0; token < chosen.n_tokens; ++token) {
        for (int64_t rank = 0; rank < chosen.n_used; ++rank) {
            std::memcpy(&chosen.ids[size_t(token * chosen.n_used + rank)],
                        bytes.data() + size_t(token) * tensor->nb[1] + size_t(rank) * tensor->nb[0], sizeof(int32_t));
        }
    }
    return chosen;
}

} // namespace

bool oa_expert_watch::callback(ggml_tensor * tensor, bool ask, void * watch) {
    const int layer = layer_of(tensor);
    if (ask) {
        return layer >= 0;
    }
    if (layer >= 0 && ggml_nelements(tensor) > 0) {
        static_cast<oa_expert_watch *>(watch)->seen_.push_back(read(tensor, layer));
    }
    return true; // go on
}

std::vector<oa_chosen_experts> oa_expert_watch::take() {
    return std::exchange(seen_, {});
}
