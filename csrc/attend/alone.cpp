#include "alone.h"

#include "ggml-cpu-impl.h"
#include "operators.h"
#include "own_attention.h"
#include "sights.h"

#include <algorithm>
#include <cstring>
#include <numeric>

namespace oa::attend {

namespace {

constexpr int64_t least_cells  = 256; // of a part
constexpr int64_t most_parts   = 16;  // each has a row of partial values
constexpr int64_t rows_at_once = 32;  // more would take much memory

int64_t most_splits(int64_t n_cells) {
    return std::clamp<int64_t>(n_cells / least_cells, 1, most_parts);
}

// The task of one row, which is cut by the number of its cells alone.
Task of_row(const Task & all, int64_t row, const int32_t * cells, int64_t n_cells) {
    Task task = all;
    task.q += size_t(row) * all.q_strides.row;
    task.out += size_t(row) * all.out_strides.row;
    task.mask += task.mask ? size_t(row) * all.mask_strides.row : 0;
    task.n_tokens     = 1;
    task.cells        = cells;
    task.n_kv         = n_cells;
    task.split_tokens = std::max(parts(parts(n_cells, most_splits(n_cells)), block_tokens), int64_t(1)) * block_tokens;
    task.n_splits     = parts(n_cells, task.split_tokens);
    return task;
}

// Lists the cells that a row sees; returns how many.
int64_t list(const Task & task, int64_t row, int32_t * cells) {
    const auto * mask = reinterpret_cast<const uint16_t *>(task.mask + size_t(row) * task.mask_strides.row);
    int64_t      n    = 0;
    for (int64_t begin = 0; begin < task.n_kv; begin += block_tokens) {
        const int64_t end = std::min(begin + block_tokens, task.n_kv);
        switch (sight_of(mask + begin, end - begin)) {
            case Sight::none: break;
            case Sight::all:
                std::iota(cells + n, cells + n + end - begin, int32_t(begin));
                n += end - begin;
                break;
            case Sight::some:
                for (int64_t cell = begin; cell < end; ++cell) {
                    cells[n] = int32_t(cell);
                    n += mask[cell] != minus_infinity;
                }
                break;
        }
    }
    return n;
}

// Where some rows' things lie in the memory that threads share, in bytes. Values of parts come first.
struct Layout {
    size_t partials_of_row; // as many as it may have
    size_t counts;          // of the cells that a row sees
    size_t lists;           // of them
    size_t end;

    explicit Layout(const Task & task) {
        const auto n    = size_t(std::min(task.n_tokens, rows_at_once));
        partials_of_row = size_t(task.n_head * most_splits(task.n_kv) * task.partial_floats()) * sizeof(float);
        counts          = GGML_PAD(n * partials_of_row, cache_line);
        lists           = counts + n * sizeof(int64_t);
        end             = lists + n * size_t(task.n_kv) * sizeof(int32_t);
    }
};

// Some rows of an operator.
class Rows {
  public:
    Rows(const Task & task, int64_t first, char * memory) :
        task_(task), at_(task), first_(first), n_(std::min(task.n_tokens - first, rows_at_once)), memory_(memory) {}

    int64_t n() const { return n_; }

    void list_cells(int64_t i) const { count(i) = task_.mask ? list(task_, first_ + i, cells(i)) : task_.n_kv; }

    Task    task(int64_t i) const { return of_row(task_, first_ + i, task_.mask ? cells(i) : nullptr, count(i)); }
    float * partials(int64_t i) const { return reinterpret_cast<float *>(memory_ + size_t(i) * at_.partials_of_row); }

  private:
    int64_t & count(int64_t i) const { return reinterpret_cast<int64_t *>(memory_ + at_.counts)[i]; }
    int32_t * cells(int64_t i) const { return reinterpret_cast<int32_t *>(memory_ + at_.lists) + i * task_.n_kv; }

    const Task & task_;
    const Layout at_;
    int64_t      first_, n_;
    char *       memory_;
};

void write_nothing(const Task & task) {
    for (int64_t head = 0; head < task.n_head; ++head) {
        memset(task.out + size_t(head) * task.out_strides.head, 0, size_t(task.d_v) * sizeof(float));
    }
}

// Every thread of the pool calls it. `memory`: of the thread.
void compute_rows(const ggml_compute_params * params, const Rows & rows, float * memory, Worked worked) {
    for (int64_t i = params->ith; i < rows.n(); i += params->nth) {
        rows.list_cells(i);
    }
    if (params->ith == 0) {
        ggml_threadpool_chunk_set(params->threadpool, params->nth);
    }
    ggml_barrier(params->threadpool);

    int64_t n_splits = 0, most_items = 0;
    for (int64_t i = 0; i < rows.n(); ++i) {
        n_splits += rows.task(i).n_splits;
    }
    // As few parts of the heads as there may be: they lie beside each other in memory and are read together.
    const int64_t wanted = few_items / std::max<int64_t>(n_splits, 1);
    const auto    cut    = [&](int64_t i) {
        Task of            = rows.task(i);
        of.heads_per_group = parts(of.n_head_kv, std::clamp<int64_t>(wanted, 1, of.n_head_kv));
        of.n_groups        = parts(of.n_head_kv, of.heads_per_group);
        return of;
    };
    for (int64_t i = 0; i < rows.n(); ++i) {
        most_items = std::max(most_items, cut(i).n_items());
    }
    // The same part of all rows, then the next one: rows of one sequence find its cells in the caches.
    for (int64_t at = params->ith; at < most_items * rows.n(); at = ggml_threadpool_chunk_add(params->threadpool, 1)) {
        const int64_t i = at % rows.n(), item = at / rows.n();
        const Task    of = cut(i);
        if (item < of.n_items()) {
            kernels().run(of, item, memory, of.n_splits > 1 ? rows.partials(i) : nullptr, worked);
        }
    }
    ggml_barrier(params->threadpool);
    for (int64_t i = params->ith; i < rows.n(); i += params->nth) {
        const Task of = rows.task(i);
        if (of.n_splits == 0) {
            write_nothing(of);
        }
        for (int64_t head = 0; of.n_splits > 1 && head < of.n_head; ++head) {
            merge(of, head, rows.partials(i));
        }
    }
}

void no_look(int64_t) {}

} // namespace

const char * read_alone(Task & task) {
    if (task.n_sequences != 1 || task.kv_sequences != 1) {
        return "rows alone have one cache for all sequences";
    }
    task.alone           = true;
    task.method          = method_of_few(task, task.group());
    task.rows_per_tile   = task.group();
    task.n_tiles         = 1;
    task.heads_per_group = task.n_head_kv;
    task.n_groups        = 1;
    return nullptr;
}

size_t alone_bytes(const Task & task, int n_threads) {
    return size_t(n_threads) * scratch_bytes(task) + Layout(task).end;
}

void compute_alone(const ggml_compute_params * params, const Task & task, char * memory, Worked worked) {
    const size_t  scratch = scratch_bytes(task);
    float * const mine    = reinterpret_cast<float *>(memory + size_t(params->ith) * scratch);
    for (int64_t first = 0; first < task.n_tokens; first += rows_at_once) {
        compute_rows(params, Rows(task, first, memory + size_t(params->nth) * scratch), mine, worked);
        ggml_barrier(params->threadpool); // the memory is used again
    }
}

} // namespace oa::attend

using namespace oa::attend;

namespace {

// An operator of one row, one K/V head at a time.
Task alone(const ggml_tensor * node) {
    Task task;
    GGML_ASSERT(!read(node, task) && task.alone && task.n_tokens == 1);
    task                 = of_row(task, 0, nullptr, task.n_kv);
    task.heads_per_group = 1;
    task.n_groups        = task.n_head_kv;
    return task;
}

} // namespace

size_t oa_attend_alone_floats(const ggml_tensor * node) {
    const Task task = alone(node);
    return kernels().scratch_floats(task) + size_t(task.n_head * task.n_splits * task.partial_floats());
}

void oa_attend_alone_compute(const ggml_tensor * node, int64_t kv_head, float * memory) {
    const Task    task     = alone(node);
    float * const partials = memory + kernels().scratch_floats(task);
    for (int64_t split = 0; split < task.n_splits; ++split) {
        kernels().run(task, kv_head * task.n_splits + split, memory, task.n_splits > 1 ? partials : nullptr, no_look);
    }
    for (int64_t head = kv_head * task.group(); task.n_splits > 1 && head < (kv_head + 1) * task.group(); ++head) {
        merge(task, head, partials);
    }
}
