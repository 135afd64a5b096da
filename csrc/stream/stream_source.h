// The files that streamed weights are read from. A weight may be repacked for the CPU in memory, or its mapping may
// vanish with the file; the file itself has the bytes as devices read them, and reading it fails instead of crashing.
#pragma once

#include "ggml.h"

#include <string>

// `weight` lies at `offset` of the open file `fd`, which is opened once more, however many weights it has.
// Throws std::runtime_error when the file cannot be kept open.
GGML_API void oa_stream_source_set(ggml_tensor * weight, int fd, size_t offset);

// Reads bytes [from, from + n) of the weight. Returns what went wrong: the file is shorter than it was, was changed
// since it was opened, or cannot be read; empty when all is well.
GGML_API std::string oa_stream_source_read(const ggml_tensor * weight, char * to, size_t from, size_t n);
