// Operators as tasks: what the files that compute them share.
#pragma once

#include "ggml.h"
#include "task.h"

namespace oa::attend {

constexpr int64_t few_items  = 32; // below that many, heads of a block are computed apart
constexpr size_t  cache_line = 64;

inline int64_t parts(int64_t whole, int64_t part) {
    return (whole + part - 1) / part;
}

const Kernels & kernels();
// Null and a task where there is a kernel for the operator, else why not.
const char * read(const ggml_tensor * node, Task & task);
// Working memory of a thread.
size_t scratch_bytes(const Task & task);
// Dots or words, for so many rows that share a K/V head.
Method method_of_few(const Task & task, int64_t rows);
// Adds up the parts of a query row, in order.
void merge(const Task & task, int64_t number, const float * partials);

} // namespace oa::attend
