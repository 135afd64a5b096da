#include "weight_stream.h"

#include "stream_lane.h"
#include "tensor_flags.h"

#include <algorithm>
#include <cstdlib>
#include <map>
#include <memory>
#include <unordered_map>

namespace {

constexpr int default_slots = 3; // one is read, one is full, one is being filled

int wanted_slots() {
    const char * text = std::getenv("OALLAMA_STREAM_SLOTS");
    return text ? std::max(2, std::atoi(text)) : default_slots;
}

} // namespace

struct oa_weight_stream {
    std::map<int, std::unique_ptr<oa_stream_lane>> lanes;  // by backend id
    std::unordered_map<const ggml_tensor *, int>   splits; // of this graph's copies
};

oa_weight_stream_t oa_stream_new() {
    return new oa_weight_stream;
}

void oa_stream_free(oa_weight_stream_t stream) {
    delete stream;
}

bool oa_stream_wanted(const ggml_tensor * op, const ggml_tensor * weight) {
    const int64_t from = OA_TENSOR_STREAM_FROM(weight->flags);
    return (op->op == GGML_OP_MUL_MAT && op->ne[1] >= from) || (op->op == GGML_OP_MUL_MAT_ID && op->ne[2] >= from);
}

void oa_stream_reset(oa_weight_stream_t stream) {
    stream->splits.clear();
    for (auto & [id, lane] : stream->lanes) {
        lane->clear();
    }
}

bool oa_stream_stale(oa_weight_stream_t stream, const ggml_tensor * copy, int split) {
    const auto it = stream->splits.find(copy);
    return it != stream->splits.end() && it->second != split;
}

void oa_stream_add(oa_weight_stream_t stream, ggml_tensor * weight, ggml_tensor * copy, int split, int backend_id,
                   ggml_backend_t backend, ggml_backend_buffer_type_t buft) {
    if (!(weight->flags & OA_TENSOR_FLAG_STREAM)) {
        return;
    }
    auto & lane = stream->lanes[backend_id];
    if (!lane) {
        lane = std::make_unique<oa_stream_lane>(backend, buft, wanted_slots());
    }
    lane->add(weight, copy, split);
    stream->splits[copy] = split;
}

void oa_stream_plan(oa_weight_stream_t stream) {
    for (auto & [id, lane] : stream->lanes) {
        lane->plan();
    }
}

bool oa_stream_allocate(oa_weight_stream_t stream) {
    return std::all_of(stream->lanes.begin(), stream->lanes.end(), [](auto & it) { return it.second->allocate(); });
}

size_t oa_stream_size(oa_weight_stream_t stream, int backend_id) {
    const auto it = stream->lanes.find(backend_id);
    return it == stream->lanes.end() ? 0 : it->second->size();
}

void oa_stream_begin(oa_weight_stream_t stream) {
    for (auto & [id, lane] : stream->lanes) {
        lane->begin();
    }
}

bool oa_stream_wait(oa_weight_stream_t stream, const ggml_tensor * input, int split) {
    return std::any_of(stream->lanes.begin(), stream->lanes.end(),
                       [&](auto & it) { return it.second->wait(input, split); });
}

void oa_stream_submitted(oa_weight_stream_t stream, int split) {
    for (auto & [id, lane] : stream->lanes) {
        lane->submitted(split);
    }
}

void oa_stream_end(oa_weight_stream_t stream) {
    for (auto & [id, lane] : stream->lanes) {
        lane->end();
    }
}
