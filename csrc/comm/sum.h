// Element kernels: sums of several arrays in a fixed order.
// Values are added one after the other in f32, in the order of the sources, and rounded once to the element type at the
// end. Compiled without contraction to FMA, so the bits do not depend on the machine.
#pragma once

#include "comm_types.h"

#include <cstddef>

size_t oa_dtype_size(oa_dtype dtype); // bytes of an element

const char * oa_dtype_name(oa_dtype dtype);

// to[i] = ((sources[0][i] + sources[1][i]) + sources[2][i]) + ..; `to` may be one of the sources.
void oa_sum(oa_dtype dtype, void * to, const void * const * sources, int n_sources, size_t n);

// The same, one element at a time: what oa_sum() is tested against.
void oa_sum_reference(oa_dtype dtype, void * to, const void * const * sources, int n_sources, size_t n);
