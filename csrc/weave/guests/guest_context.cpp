#include "guest_context.h"

#include "guest_cache.h"

namespace oa::weave {

GuestContext::GuestContext(GuestCache * cache, std::vector<GuestBatch> batches, llama_kv_cache::slot_info_vec_t sinfos,
                           std::vector<llama_ubatch> locals) :
    llama_kv_cache_context(cache, std::move(sinfos), locals),
    cache_(cache), batches_(std::move(batches)), locals_(std::move(locals)) {}

bool GuestContext::next() {
    if (n_local() > 0) {
        llama_kv_cache_context::next();
        ++at_local_;
    }
    return ++at_ < batches_.size();
}

bool GuestContext::apply() {
    if (n_local() > 0 && !llama_kv_cache_context::apply()) {
        return false;
    }
    cache_->apply_guests(get_ubatch(), n_local(), n_new());
    return true;
}

} // namespace oa::weave
