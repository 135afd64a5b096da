// Rows of queries that are computed alone, each from the list of cells that it sees. docs/attention.md.
#pragma once

#include "task.h"

struct ggml_compute_params;

namespace oa::attend {

// Prepares a task, or says why there is no kernel for it.
const char * read_alone(Task & task);
size_t       alone_bytes(const Task & task, int n_threads);
// Every thread of the pool calls it.
void compute_alone(const ggml_compute_params * params, const Task & task, char * memory, Worked worked);

} // namespace oa::attend
