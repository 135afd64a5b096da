#include "arena.h"

#include "ggml-impl.h"
#include "tensor_flags.h"

#include <algorithm>
#include <map>
#include <unordered_map>

namespace {

// One allocator (buffer type) during the passes over one graph.
struct pass {
    std::vector<oa_block>                    blocks;
    std::map<std::pair<int, size_t>, size_t> live;                 // chunk and offset -> block
    std::map<int, size_t>                    chunks;               // bytes
    size_t                                   bytes = 0, bound = 0; // alive now, and at most
    bool                                     closed = false;
    std::vector<size_t>                      offsets; // of the second pass; empty: the allocator chooses again
    size_t                                   next = 0;
};

struct recorder {
    bool                                   running = false, offline = false, recording = false;
    size_t                                 now = 0;
    std::unordered_map<const void *, pass> passes;
    std::vector<oa_arena>                  arenas;
};

thread_local recorder t;

bool wants_offline(const ggml_cgraph * graph) {
    for (int i = 0; i < graph->n_nodes; ++i) {
        for (const ggml_tensor * src : graph->nodes[i]->src) {
            const ggml_tensor * origin = src && src->view_src ? src->view_src : src;
            if (origin && (origin->flags & OA_TENSOR_FLAG_ARENAS_OFFLINE)) {
                return true;
            }
        }
    }
    return false;
}

oa_arena close(pass & p, ggml_backend_buffer_type_t buft) {
    p.closed = true;
    for (const auto & [place, block] : p.live) {
        p.blocks[block].last = t.now; // outputs, and what the graph only keeps
    }
    oa_arena arena{ buft, 0, 0, p.bound, p.blocks };
    for (const auto & [chunk, nbytes] : p.chunks) {
        arena.online += nbytes;
    }
    p.offsets     = oa_offline_offsets(p.blocks);
    arena.offline = oa_arena_end(p.blocks, p.offsets);
    return arena;
}

} // namespace

void oa_arenas_begin(const ggml_cgraph * graph) {
    t.offline = wants_offline(graph);
    t.running = t.offline || t.recording;
    t.now     = 0;
    t.passes.clear();
}

bool oa_arenas_again(const ggml_backend_buffer_type_t * bufts, const void * const * allocators, int n) {
    bool again = false;
    for (int i = 0; i < n && t.running; ++i) {
        const auto it = t.passes.find(allocators[i]);
        if (it == t.passes.end() || it->second.closed) {
            continue; // nothing in it, or a buffer type that several backends share
        }
        const oa_arena arena = close(it->second, bufts[i]);
        // One chunk only: a larger arena than the device takes in one piece stays with the allocator.
        const bool better = arena.offline < arena.online && arena.offline <= ggml_backend_buft_get_max_size(bufts[i]);
        if (t.offline && better) {
            again = true;
        } else {
            it->second.offsets.clear();
        }
        if (t.recording) {
            t.arenas.push_back(arena);
        }
    }
    t.running = again;
    return again;
}

void oa_arenas_end() {
    t.running = false;
    t.passes.clear();
}

bool oa_arenas_place(const void * allocator, size_t nbytes, size_t * offset) {
    if (!t.running) {
        return false;
    }
    pass & p = t.passes[allocator];
    if (p.offsets.empty()) {
        return false;
    }
    if (nbytes == 0) {
        *offset = 0;
        return true;
    }
    GGML_ASSERT(p.next < p.blocks.size() && p.blocks[p.next].nbytes == nbytes);
    *offset = p.offsets[p.next++];
    return true;
}

void oa_arenas_add(const void * allocator, int chunk, size_t offset, size_t nbytes) {
    if (!t.running || nbytes == 0) {
        return;
    }
    pass & p                  = t.passes[allocator];
    p.live[{ chunk, offset }] = p.blocks.size();
    p.blocks.push_back({ nbytes, t.now++, 0 });
    p.chunks[chunk] = std::max(p.chunks[chunk], offset + nbytes);
    p.bytes += nbytes;
    p.bound = std::max(p.bound, p.bytes);
}

bool oa_arenas_remove(const void * allocator, int chunk, size_t offset, size_t nbytes) {
    if (!t.running) {
        return false;
    }
    pass & p = t.passes[allocator];
    if (!p.offsets.empty()) {
        return true;
    }
    p.bytes -= nbytes;
    const auto it = p.live.find({ chunk, offset });
    if (it != p.live.end()) { // else it is the end of a block, whose beginning goes on
        p.blocks[it->second].last = t.now++;
        p.live.erase(it);
    }
    return false;
}

void oa_arenas_record() {
    t.recording = true;
    t.arenas.clear();
}

std::vector<oa_arena> oa_arenas_take() {
    t.recording = false;
    return std::move(t.arenas);
}
