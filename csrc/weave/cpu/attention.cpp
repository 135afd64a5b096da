#include "attention.h"

#include "attend_rows.h"
#include "common.h"
#include "ggml-cpu-impl.h"
#include "ggml-cpu.h"
#include "ggml.h"
#include "ops.h"
#include "own_attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace oa::weave {

namespace {

constexpr uint32_t max_width = 4096, max_chunks = 1024;

// Working memory of the thread, as large as it ever had to be.
float * scratch(size_t n_floats) {
    static thread_local std::vector<float> memory;
    if (memory.size() < n_floats) {
        memory.resize(n_floats);
    }
    return memory.data();
}

ggml_fp16_t * mask_of(size_t n_values) {
    static thread_local std::vector<ggml_fp16_t> memory;
    if (memory.size() < n_values) {
        memory.resize(n_values);
    }
    return memory.data();
}

struct Stride {
    size_t of1, of2;
};

ggml_tensor tensor(ggml_type type, int64_t ne0, int64_t ne1, int64_t ne2, Stride stride, const void * data) {
    ggml_tensor made = {};
    made.type        = type;
    made.ne[0]       = ne0;
    made.ne[1]       = ne1;
    made.ne[2]       = ne2;
    made.ne[3]       = 1;
    made.nb[0]       = ggml_type_size(type);
    made.nb[1]       = stride.of1;
    made.nb[2]       = stride.of2;
    made.nb[3]       = stride.of2 * size_t(ne2);
    made.data        = const_cast<void *>(data);
    return made;
}

// What llama.cpp's mask of a causal model says for tokens 0 .. n_tokens - 1, seen from `position`.
void fill_mask(ggml_fp16_t * row, uint32_t n_tokens, uint32_t position, bool alibi) {
    const ggml_fp16_t zero = ggml_fp32_to_fp16(0.0f), never = ggml_fp32_to_fp16(-INFINITY);
    for (uint32_t at = 0; at < n_tokens; ++at) {
        row[at] = at > position ? never : alibi ? ggml_fp32_to_fp16(-float(position - at)) : zero;
    }
}

// How ggml-cpu would have cut it; our kernels do so by the length.
bool is_cut_soundly(const AttendTask & task) {
    return task.n_chunks > 0 && task.n_chunks <= max_chunks &&
           (task.n_chunks == 1 || (task.n_rows == 1 && !task.tiled && !task.own)) && !(task.tiled && task.own);
}

// Whether this process has the kernel that is asked for.
bool has_kernel(const AttendTask & task, const OpenTask & made) {
    return !task.own || task.own == oa_attend_alone(ggml_type(made.k_type), ggml_type(made.v_type), task.d_k, task.d_v);
}

} // namespace

Status AttendJob::read(Kind kind, const char * payload, size_t nbytes, size_t result_nbytes, const Store & store) {
    if (nbytes < sizeof(task_)) {
        return Status::malformed;
    }
    memcpy(&task_, payload, sizeof(task_));
    const bool sound = kind == Kind::append ? is_sound_append(task_, max_width, 1) : is_sound(task_, max_width, 1);
    if (!sound || !is_cut_soundly(task_) || !fits_slots(task_, nbytes, result_nbytes)) {
        return Status::malformed;
    }
    const AttendLayout layout(task_);
    const auto *       given = reinterpret_cast<const SequenceRows *>(payload + layout.rows);
    rows_.clear();
    uint32_t first = 0;
    for (uint32_t i = 0; i < task_.n_sequences; ++i) {
        const Sequence * sequence = store.find(given[i].handle);
        if (!sequence) {
            return Status::unknown_sequence;
        }
        const OpenTask & made   = sequence->made;
        const bool       blocks = task_.d_k % ggml_blck_size(ggml_type(made.k_type)) == 0 &&
                            task_.d_v % ggml_blck_size(ggml_type(made.v_type)) == 0;
        const bool tiles = (made.k_type == GGML_TYPE_F16 || made.k_type == GGML_TYPE_F32) && made.k_type == made.v_type;
        if (!fits_shape(task_, made) || !blocks || !has_kernel(task_, made) || is_again(given, i) ||
            ((task_.tiled || task_.n_chunks > 1) && !tiles)) {
            return Status::malformed;
        }
        const Status status = check_rows(given[i], task_.n_rows - first, sequence->n_tokens);
        if (status != Status::ok) {
            return status;
        }
        rows_.push_back({ given[i], sequence, first });
        first += given[i].n_rows;
    }
    if (first != task_.n_rows) {
        return Status::malformed;
    }
    const auto * sinks = reinterpret_cast<const float *>(payload + layout.sinks);
    sinks_.assign(sinks, sinks + (task_.has_sinks ? task_.n_head : 0));
    q_ = reinterpret_cast<const float *>(payload + layout.q);
    k_ = reinterpret_cast<const float *>(payload + layout.k);
    v_ = reinterpret_cast<const float *>(payload + layout.v);
    return Status::ok;
}

void AttendJob::run(uint32_t item, float * out) const {
    const Rows &   rows = rows_[item / task_.n_head_kv];
    const uint32_t head = item % task_.n_head_kv;
    append(rows, head);
    if (task_.n_head > 0) {
        attend(rows, head, out + size_t(rows.first) * task_.n_head * task_.d_v);
    }
}

void AttendJob::append(const Rows & rows, uint32_t head) const {
    const OpenTask & made = rows.sequence->made;
    for (uint32_t i = 0; i < rows.given.n_rows; ++i) {
        const size_t row   = rows.first + i;
        const auto   store = [&](uint32_t kept, const float * values, uint32_t d, char * cache) {
            const auto   type  = ggml_type(kept);
            const size_t width = size_t(task_.n_head_kv) * d;
            char *       to    = cache + (rows.given.position + i) * ggml_row_size(type, int64_t(width)) +
                        ggml_row_size(type, int64_t(head) * d);
            const float * from = values + row * width + size_t(head) * d;
            if (type == GGML_TYPE_F32) {
                memcpy(to, from, d * sizeof(float));
            } else {
                ggml_get_type_traits_cpu(type)->from_float(from, to, d);
            }
        };
        store(made.k_type, k_, task_.d_k, rows.sequence->k(task_.layer));
        store(made.v_type, v_, task_.d_v, rows.sequence->v(task_.layer));
    }
}

void AttendJob::attend(const Rows & rows, uint32_t head, float * out) const {
    const OpenTask & made   = rows.sequence->made;
    const auto       k_type = ggml_type(made.k_type), v_type = ggml_type(made.v_type);
    const uint32_t   n_head = task_.n_head, d_k = task_.d_k, d_v = task_.d_v, per_kv = n_head / task_.n_head_kv;
    const size_t     q_row = size_t(n_head) * d_k, floats = sizeof(float);

    // All heads are described, those of this KV head are computed: ALiBi's slopes and sinks go by the head's number.
    const auto compute = [&](uint32_t first, uint32_t n_rows, ggml_fp16_t * mask_rows, auto && kernel) {
        const uint32_t n_tokens = rows.given.position + first + n_rows;
        ggml_tensor    q        = tensor(GGML_TYPE_F32, d_k, n_rows, n_head, { q_row * floats, d_k * floats },
                                         q_ + (rows.first + first) * q_row);
        ggml_tensor    k        = tensor(k_type, d_k, n_tokens, task_.n_head_kv,
                                         { ggml_row_size(k_type, int64_t(task_.n_head_kv) * d_k), ggml_row_size(k_type, d_k) },
                                         rows.sequence->k(task_.layer));
        ggml_tensor    v        = tensor(v_type, d_v, n_tokens, task_.n_head_kv,
                                         { ggml_row_size(v_type, int64_t(task_.n_head_kv) * d_v), ggml_row_size(v_type, d_v) },
                                         rows.sequence->v(task_.layer));
        ggml_tensor mask = tensor(GGML_TYPE_F16, n_tokens, n_rows, 1, { n_tokens * sizeof(ggml_fp16_t), 0 }, mask_rows);
        ggml_tensor sinks = tensor(GGML_TYPE_F32, n_head, 1, 1, { n_head * floats, n_head * floats }, sinks_.data());
        ggml_tensor dst   = tensor(GGML_TYPE_F32, d_v, n_head, n_rows, { d_v * floats, size_t(n_head) * d_v * floats },
                                   out + size_t(first) * n_head * d_v);
        dst.src[0]        = &q;
        dst.src[1]        = &k;
        dst.src[2]        = &v;
        dst.src[3]        = mask_rows ? &mask : nullptr;
        dst.src[4]        = sinks_.empty() ? nullptr : &sinks;
        const float parameters[] = { task_.scale, task_.max_bias, task_.softcap };
        memcpy(dst.op_params, parameters, sizeof(parameters));
        kernel(dst, int(head * per_kv * n_rows), int((head + 1) * per_kv * n_rows), n_tokens);
    };

    ggml_compute_params params = {};
    params.nth                 = 1;
    const bool     alibi       = task_.max_bias > 0.0f;
    const uint32_t position    = rows.given.position;

    if (task_.tiled) {
        constexpr size_t tile_q = ggml_fa_tile_config::Q, tile_kv = ggml_fa_tile_config::KV;
        params.wdata = scratch(tile_q * d_k + 2 * tile_q * tile_kv + tile_q * d_v + tile_kv * d_v + tile_kv * d_k +
                               CACHE_LINE_SIZE_F32);
        for (uint32_t first = 0; first < rows.given.n_rows; first += tile_q) {
            const uint32_t n_rows   = std::min<uint32_t>(tile_q, rows.given.n_rows - first);
            const uint32_t n_tokens = position + first + n_rows;
            ggml_fp16_t *  mask     = mask_of(size_t(n_tokens) * n_rows);
            for (uint32_t i = 0; i < n_rows; ++i) {
                fill_mask(mask + size_t(i) * n_tokens, n_tokens, position + first + i, alibi);
            }
            compute(first, n_rows, mask, [&](ggml_tensor & dst, int begin, int end, uint32_t) {
                ggml_compute_forward_flash_attn_ext_tiled(&params, &dst, begin, end);
            });
        }
        return;
    }
    const auto row_mask = [&](uint32_t i) -> ggml_fp16_t * {
        if (!alibi) {
            return nullptr;
        }
        ggml_fp16_t * mask = mask_of(position + i + 1);
        fill_mask(mask, position + i + 1, position + i, alibi);
        return mask;
    };
    if (task_.own) {
        for (uint32_t i = 0; i < rows.given.n_rows; ++i) {
            compute(i, 1, row_mask(i), [&](ggml_tensor & dst, int, int, uint32_t) {
                dst.op_params[OA_ATTEND_PARAM] = OA_ATTEND_ALONE;
                oa_attend_alone_compute(&dst, head, scratch(oa_attend_alone_floats(&dst)));
            });
        }
        return;
    }
    const size_t per_head = d_k + 2 * d_v + CACHE_LINE_SIZE_F32, partial = 2 + d_v;
    params.wdata = scratch(n_head * per_head + size_t(n_head) * task_.n_chunks * partial);
    for (uint32_t i = 0; i < rows.given.n_rows; ++i) {
        compute(i, 1, row_mask(i), [&](ggml_tensor & dst, int begin, int end, uint32_t n_tokens) {
            if (task_.n_chunks == 1) {
                ggml_compute_forward_flash_attn_ext_f16_one_chunk(&params, &dst, begin, end, 0, n_tokens, nullptr, 0);
                return;
            }
            const int64_t chunk    = (int64_t(task_.n_padded) + task_.n_chunks - 1) / task_.n_chunks;
            float *       partials = static_cast<float *>(params.wdata) + n_head * per_head;
            for (int64_t at = 0; at < task_.n_chunks; ++at) {
                const int64_t from = std::min<int64_t>(at * chunk, n_tokens);
                const int64_t to   = std::min<int64_t>(from + chunk, n_tokens);
                ggml_compute_forward_flash_attn_ext_f16_one_chunk(&params, &dst, begin, end, from, to,
                                                                  partials + at * int64_t(partial),
                                                                  int64_t(task_.n_chunks * partial));
            }
            ggml_compute_params of_head = params;
            of_head.nth                 = int(n_head);
            for (of_head.ith = begin; of_head.ith < end; ++of_head.ith) {
                ggml_flash_attn_ext_reduce_partials(&of_head, &dst, task_.n_chunks, chunk);
            }
        });
    }
}

} // namespace oa::weave
