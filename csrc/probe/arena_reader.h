// The arenas of a model's graphs under the thread's backend map, by the allocators' dry run: nothing is allocated.
#pragma once

#include "llama.h"

#include <string>
#include <utility>
#include <vector>

struct oa_arena_info {
    uint32_t                         n_tokens, n_outputs; // of the graph
    std::string                      buffer_type;
    std::string                      device; // the device behind it
    bool                             is_host;
    size_t                           online, offline, bound; // bytes, as in arena.h
    std::vector<std::vector<size_t>> blocks;                 // bytes, first, last
};

// Of every graph (n_tokens, n_outputs), in turn. Throws std::runtime_error if the file cannot be loaded.
std::vector<oa_arena_info> oa_read_arenas(const std::string & path, const llama_model_params & model_params,
                                          const llama_context_params &                       context_params,
                                          const std::vector<std::pair<uint32_t, uint32_t>> & graphs);
