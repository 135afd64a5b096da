// Memory on the host for tables that no file has.
#pragma once

#include "ggml-backend.h"

// As the CPU's own type, of whose memory a load takes the pages of a mapped file.
GGML_API ggml_backend_buffer_type_t oa_segments_table_buft();
