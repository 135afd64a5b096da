#include "weight_stream.h"

#include "ggml-impl.h"
#include "stream_lane.h"
#include "tensor_flags.h"

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <unordered_map>
#include <utility>

struct oa_weight_stream {
    std::map<int, std::unique_ptr<oa_stream_lane>> lanes;  // by backend id
    std::unordered_map<const ggml_tensor *, int>   splits; // of this graph's copies
};

namespace {

std::mutex                   g_mutex;
std::string                  g_error;
std::set<oa_weight_stream_t> g_streams;

} // namespace

oa_weight_stream_t oa_stream_new() {
    auto *                            stream = new oa_weight_stream;
    const std::lock_guard<std::mutex> lock(g_mutex);
    g_streams.insert(stream);
    return stream;
}

void oa_stream_free(oa_weight_stream_t stream) {
    {
        const std::lock_guard<std::mutex> lock(g_mutex);
        g_streams.erase(stream);
    }
    delete stream;
}

std::string oa_stream_take_error() {
    const std::lock_guard<std::mutex> lock(g_mutex);
    return std::exchange(g_error, {});
}

void oa_stream_fail(const std::string & error) {
    const std::lock_guard<std::mutex> lock(g_mutex);
    g_error = error;
    GGML_LOG_ERROR("%s\n", error.c_str());
}

std::vector<oa_stream_lane_info> oa_stream_lanes() {
    const std::lock_guard<std::mutex> lock(g_mutex);
    std::vector<oa_stream_lane_info>  result;
    for (const oa_weight_stream_t stream : g_streams) {
        for (auto & [id, lane] : stream->lanes) {
            const oa_stream_memory m = lane->memory();
            result.push_back({ lane->device(), lane->size(), m.pooled, m.limit, m.pinned, m.note });
        }
    }
    return result;
}

bool oa_stream_wanted(const ggml_tensor * op, const ggml_tensor * weight) {
    const int64_t from = OA_STREAM_FROM(weight);
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
        lane = std::make_unique<oa_stream_lane>(backend, buft, OA_STREAM_SLOTS(weight));
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

oa_stream_state oa_stream_wait(oa_weight_stream_t stream, const ggml_tensor * input, int split) {
    for (auto & [id, lane] : stream->lanes) {
        const oa_stream_state state = lane->wait(input, split);
        if (state == OA_STREAM_FAILED) {
            oa_stream_fail(lane->error());
        }
        if (state != OA_STREAM_NONE) {
            return state;
        }
    }
    return OA_STREAM_NONE;
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
