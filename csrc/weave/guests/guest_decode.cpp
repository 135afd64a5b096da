// Decoding with guests, of whom some may be lost on the way; and how a context comes to have guests.
#include "guest_hooks.h"
#include "guest_places.h"
#include "llama-hparams.h"
#include "llama-impl.h"
#include "llama-model.h"
#include "tensor_flags.h"

#include <cstdlib>
#include <optional>
#include <set>
#include <sstream>

using namespace oa::weave;

namespace {

constexpr int most_tries = 8; // each costs a deadline, and the tokens of those that were lost

std::optional<GuestOptions> wanted;

GuestOptions options_of_environment() {
    GuestOptions options;
    if (const char * paths = getenv("OALLAMA_WEAVE_CHANNELS")) {
        std::istringstream all(paths);
        for (std::string path; std::getline(all, path, ',');) {
            options.channels.push_back(path);
        }
    }
    if (const char * first = getenv("OALLAMA_WEAVE_FIRST_GUEST")) {
        options.first_guest = atoi(first);
    }
    if (const char * deadline = getenv("OALLAMA_WEAVE_DEADLINE_MS")) {
        options.sender.deadline_s = 1e-3 * atof(deadline);
    }
    return options;
}

GuestCache * guests_of(llama_context * ctx) {
    return dynamic_cast<GuestCache *>(ctx->get_memory());
}

// A device says that its receiver has failed when its graphs have ended.
int decode(llama_context * ctx, GuestCache & cache, const llama_batch_ext & batch) {
    const int result = ctx->decode(batch);
    ctx->synchronize();
    cache.look_after_device();
    return result;
}

// The tokens of a sequence into the cache.
bool compute(llama_context * ctx, GuestCache & cache, llama_seq_id seq_id, const std::vector<llama_token> & tokens) {
    llama_batch_ext batch(ctx);
    const size_t    n_batch = ctx->n_batch();
    for (size_t begin = 0; begin < tokens.size(); begin += n_batch) {
        batch.clear();
        for (size_t i = begin; i < std::min(begin + n_batch, tokens.size()); ++i) {
            const int32_t   at       = batch.add_token(seq_id);
            const llama_pos position = llama_pos(i);
            if (at < 0 || !batch.set_token_id(at, tokens[i]) || !batch.set_token_pos(at, &position)) {
                return false;
            }
        }
        if (decode(ctx, cache, batch) != 0) {
            return false;
        }
    }
    return true;
}

// The tokens of a guest that was lost: here, or by another receiver.
bool compute_again(llama_context * ctx, GuestCache & cache, llama_seq_id seq_id,
                   const std::vector<llama_token> & tokens) {
    LLAMA_LOG_INFO("%s: sequence %d: %zu tokens are computed again\n", __func__, seq_id, tokens.size());
    cache.coming_home = seq_id;
    const bool done   = compute(ctx, cache, seq_id, tokens);
    cache.coming_home = -1;
    if (done || !cache.has_room(uint32_t(tokens.size()))) {
        return done;
    }
    cache.seq_rm(seq_id, -1, -1);
    return compute(ctx, cache, seq_id, tokens) && !cache.is_lost(seq_id);
}

} // namespace

bool oa_weave_is_guest(llama_context * ctx, llama_seq_id seq_id) {
    const GuestCache * cache = guests_of(ctx);
    return cache && cache->is_guest(seq_id) && !cache->is_lost(seq_id);
}

bool oa_weave_has_room(llama_context * ctx, uint32_t n_tokens) {
    GuestCache * cache = guests_of(ctx);
    return cache && cache->has_room(n_tokens);
}

void oa_weave_set_guests(const GuestOptions & options) {
    wanted = options;
}

GuestStats oa_weave_guest_stats(llama_context * ctx) {
    const GuestCache * cache = guests_of(ctx);
    return cache ? cache->stats() : GuestStats();
}

llama_kv_cache * oa_weave_new_cache(const llama_model & model, const llama_hparams & hparams, ggml_type type_k,
                                    ggml_type type_v, bool v_trans, bool offload, bool unified, uint32_t kv_size,
                                    uint32_t n_seq_max, uint32_t n_pad, uint32_t n_swa, llama_swa_type swa_type,
                                    llama_memory_t mem_other, const llama_kv_cache::layer_filter_cb & filter,
                                    const llama_kv_cache::layer_reuse_cb & reuse,
                                    const llama_kv_cache::layer_share_cb & share) {
    GuestOptions options = wanted ? *wanted : options_of_environment();
    if (options.channels.empty()) {
        return new llama_kv_cache(model, hparams, type_k, type_v, v_trans, offload, unified, kv_size, n_seq_max, n_pad,
                                  n_swa, swa_type, mem_other, filter, reuse, share);
    }
    if (v_trans || !(unified || n_seq_max == 1) || hparams.n_pos_per_embd() != 1 || hparams.n_rel_attn_bkts > 0) {
        throw std::runtime_error("sequences with a receiver need flash attention, a unified KV cache (kv_unified) and "
                                 "positions of one dimension, without a learned bias");
    }
    const bool own_attention = model.tok_embd && model.tok_embd->flags & OA_TENSOR_FLAG_ATTENDS;
    return new GuestCache(std::move(options), own_attention, hparams, model, hparams, type_k, type_v, v_trans, offload,
                          unified, kv_size, n_seq_max, n_pad, n_swa, swa_type, mem_other, filter, reuse, share);
}

bool oa_weave_decode(llama_context * ctx, const llama_batch_ext & batch, int & result) {
    GuestCache * cache = guests_of(ctx);
    if (!cache || cache->decoding) {
        return false;
    }
    std::map<llama_seq_id, llama_pos> before;
    for (const auto & token : batch.tokens) {
        for (llama_seq_id seq_id : token.seq_ids) {
            before.emplace(seq_id, cache->seq_pos_max(seq_id));
        }
    }
    const auto anyone_lost = [&] {
        return std::any_of(before.begin(), before.end(), [&](const auto & of) { return cache->is_lost(of.first); });
    };
    cache->decoding = true;
    for (int i = 0; i < most_tries; ++i) {
        result = decode(ctx, *cache, batch);
        if (!anyone_lost()) {
            break;
        }
        // As when a batch finds no room: the caller may make some, and try again. So it is after the last try, too,
        // with all guests back: llama-server then ends the request of one that came home, or tries with smaller
        // batches.
        result = 1;
        for (const auto & [seq_id, position] : before) {
            cache->seq_rm(seq_id, position + 1, -1);
        }
        bool all_are_back = true;
        for (const auto & [seq_id, position] : before) {
            auto tokens = cache->take_back(seq_id);
            if (!tokens.empty() && !compute_again(ctx, *cache, seq_id, tokens)) {
                cache->put_back(seq_id, std::move(tokens));
                all_are_back = false;
            }
        }
        if (!all_are_back) {
            break;
        }
    }
    cache->decoding = false;
    return true;
}
