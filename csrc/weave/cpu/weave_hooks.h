// What patch 0010 calls in ggml-cpu. Without a receiver every hook is a test of a null pointer. docs/weave.md.
#pragma once

#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// The first thread of a CPU graph: at its begin and end.
void oa_weave_graph(bool begins);
// Every thread, after every operator.
void oa_weave_poll(void);
// Every thread, inside of matrix multiplications: it has done so many multiply-adds since it said so last.
void oa_weave_worked(int64_t n_multiply_adds);
// How many of n_rows rows of a matrix to compute before that: a multiple of `multiple`; all of them where nobody waits.
int64_t oa_weave_rows(int64_t n_rows, int64_t multiple, int64_t multiply_adds_per_row);

#ifdef __cplusplus
}
#endif
