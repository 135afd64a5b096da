#include "arena_reader.h"

#include "arena.h"
#include "llama-context.h"
#include "llama-memory.h"
#include "model_skeleton.h"

#include <algorithm>

std::vector<oa_arena_info> oa_read_arenas(const std::string & path, const llama_model_params & model_params,
                                          const llama_context_params &                       context_params,
                                          const std::vector<std::pair<uint32_t, uint32_t>> & graphs) {
    const oa_model_skeleton skeleton(path, model_params, context_params);
    llama_context *         context = skeleton.context();
    std::vector<size_t>     sizes(ggml_backend_sched_get_n_backends(context->get_sched()));

    std::vector<oa_arena_info> result;
    for (const auto & [n_tokens, n_outputs] : graphs) {
        const llama_memory_t           memory = context->get_memory();
        const llama_memory_context_ptr state  = memory ? memory->init_full() : nullptr;
        // A graph of n tokens has at least one sequence; llama.cpp reserves those of all.
        const uint32_t n_seqs = std::min(n_tokens, context->n_seq_max());
        oa_arenas_record();
        context->graph_reserve(n_tokens, n_seqs, n_outputs, state.get(), /*split_only=*/true, sizes.data());
        for (oa_arena & arena : oa_arenas_take()) {
            ggml_backend_dev_t device = ggml_backend_buft_get_device(arena.buft);
            result.push_back({ n_tokens,
                               n_outputs,
                               ggml_backend_buft_name(arena.buft),
                               device ? ggml_backend_dev_name(device) : "CPU",
                               ggml_backend_buft_is_host(arena.buft),
                               arena.online,
                               arena.offline,
                               arena.bound,
                               {} });
            for (const oa_block & block : arena.blocks) {
                result.back().blocks.push_back({ block.nbytes, block.first, block.last });
            }
        }
    }
    return result;
}
