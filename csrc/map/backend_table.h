// The table of a backend map as text, parsed: what it says of weights, layers and the whole model, by the names that it
// uses. It knows no devices and no model. Format: docs/architecture.md, "Backend map".
#pragma once

#include "division.h"

#include <cstdint>
#include <map>
#include <string>

enum class oa_weight_mode {
    resident, // computed on the device that holds it
    host,     // computed on the CPU, never uploaded
    upload,   // upstream's op_offload rule decides
    stream,   // from some number of tokens on copied to an accelerator ahead of its operator
};

enum class oa_realisation {
    any, // llama.cpp's own choice
    plain,
    repacked,
    tiled, // plain memory, and our kernels for few and for many rows of activations
    twice, // "repacked+tiled": in memory as both
};

struct oa_table_weight {
    std::string    device;
    oa_weight_mode mode        = oa_weight_mode::resident;
    int            stream_from = 0; // tokens; 0: never
    oa_realisation realisation = oa_realisation::any;
};

struct oa_table_segment {
    std::string device;
    oa_division part;
};

struct oa_table_options {
    int  slots          = 3; // of streams: one is read, one is full, one is being filled
    int  uploads        = 1; // of experts, for a layer with slots in a step
    bool stream_caches  = false;
    bool offline_arenas = false;
    bool own_attention  = false;
    bool whole_layers   = false;
};

struct oa_backend_table {
    std::map<int, std::string>              layers;
    std::map<std::string, oa_table_weight>  weights;
    std::map<std::string, oa_table_segment> segments;
    oa_table_options                        options;
};

// Throws std::invalid_argument naming the bad line.
oa_backend_table oa_backend_table_parse(const std::string & text);
