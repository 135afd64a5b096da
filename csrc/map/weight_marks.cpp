#include "weight_marks.h"

#include "ggml-backend.h"
#include "stream_source.h"
#include "tensor_flags.h"

#include <cstdlib>
#include <string>
#include <string_view>

void oa_backend_map_mark(ggml_tensor * weight, const oa_weight_place & place, int fd, size_t offset, bool lazy) {
    if (lazy) {
        weight->flags |= OA_TENSOR_FLAG_LAZY;
    }
    if (!place.home) {
        const char * own = std::getenv("OALLAMA_OWN_KERNELS");
        if (own && std::string(own) == "1") {
            const bool embeds = std::string(weight->name) == "token_embd.weight";
            weight->flags |= OA_TENSOR_FLAG_TILED | (embeds ? OA_TENSOR_FLAG_ATTENDS : 0);
        }
        return;
    }
    oa_backend_map_require(!lazy || ggml_backend_dev_type(place.home) == GGML_BACKEND_DEVICE_TYPE_CPU, weight->name,
                           place.home);
    weight->flags |= OA_TENSOR_FLAG_MAPPED;
    if (place.options.offline_arenas) {
        weight->flags |= OA_TENSOR_FLAG_ARENAS_OFFLINE;
    }
    if (place.mode == oa_weight_mode::host) {
        weight->flags |= OA_TENSOR_FLAG_HOST;
    }
    if (place.realisation == oa_realisation::tiled || place.realisation == oa_realisation::twice) {
        weight->flags |= OA_TENSOR_FLAG_TILED;
    }
    if (place.mode == oa_weight_mode::stream) {
        // An embedding that is the output matrix, too, may be marked already; its rows are fetched on the host either
        // way.
        weight->flags &= ~OA_TENSOR_FLAG_HOST;
        weight->flags |= OA_TENSOR_FLAG_STREAM;
        OA_STREAM_FROM(weight)  = place.stream_from;
        OA_STREAM_SLOTS(weight) = place.options.slots;
    }
    if (fd >= 0 && (place.mode == oa_weight_mode::stream || place.segment.part.slots > 0)) {
        oa_stream_source_set(weight, fd, offset);
    }
    if (std::string(weight->name) == "token_embd.weight") {
        weight->flags |= place.options.stream_caches ? OA_TENSOR_FLAG_STREAMS_CACHES : 0;
        weight->flags |= place.options.own_attention ? OA_TENSOR_FLAG_ATTENDS : 0;
        weight->flags |= place.options.whole_layers ? OA_TENSOR_FLAG_WHOLE_LAYERS : 0;
    }
}

bool oa_backend_map_obeyed(const ggml_tensor * weight) {
    return weight != nullptr && (weight->flags & OA_TENSOR_FLAG_MAPPED) != 0;
}

bool oa_backend_map_pins(const ggml_tensor * embedding, const char * op, int il) {
    if (il < 0 || !embedding || !(embedding->flags & OA_TENSOR_FLAG_WHOLE_LAYERS)) {
        return false;
    }
    const std::string_view name = op;
    return name == "norm" || name == "l_out" || name == "l_last";
}

bool oa_backend_map_fuses(const ggml_tensor * weight, ggml_backend_dev_t layer, const ggml_tensor * fused) {
    return oa_backend_map_obeyed(weight) && ggml_backend_dev_supports_op(layer, fused);
}

void oa_backend_map_mark_cache(const ggml_tensor * embedding, ggml_backend_buffer_type_t buft, ggml_tensor * k,
                               ggml_tensor * v) {
    if (!oa_backend_map_obeyed(embedding)) {
        return;
    }
    const bool streams = (embedding->flags & OA_TENSOR_FLAG_STREAMS_CACHES) && ggml_backend_buft_is_host(buft);
    for (ggml_tensor * cache : { k, v }) {
        if (cache) {
            cache->flags |= OA_TENSOR_FLAG_CACHE | (streams ? OA_TENSOR_FLAG_STREAM : 0);
        }
    }
}
