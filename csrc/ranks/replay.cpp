#include "replay.h"

#include "llama-batch.h"
#include "llama-impl.h"

#include <cstring>
#include <map>
#include <stdexcept>
#include <type_traits>
#include <vector>

namespace {

// A call as bytes, in the order of its arguments.
class message {
  public:
    message() = default;

    explicit message(std::vector<char> bytes) : bytes_(std::move(bytes)) {}

    template <typename T> message & put(const T & value) {
        static_assert(std::is_trivially_copyable_v<T>);
        return put(&value, 1);
    }

    template <typename T> message & put(const T * values, size_t n) {
        const auto * from = reinterpret_cast<const char *>(values);
        bytes_.insert(bytes_.end(), from, from + n * sizeof(T));
        return *this;
    }

    template <typename T> T get() {
        T value;
        get(&value, 1);
        return value;
    }

    template <typename T> void get(T * values, size_t n) {
        if (n * sizeof(T) > bytes_.size() - at_) {
            throw std::runtime_error("a call of rank 0 is cut off");
        }
        std::memcpy(values, bytes_.data() + at_, n * sizeof(T));
        at_ += n * sizeof(T);
    }

    template <typename T> std::vector<T> get_many(size_t n) {
        std::vector<T> values(n);
        get(values.data(), n);
        return values;
    }

    std::vector<char> & bytes() { return bytes_; }

  private:
    std::vector<char> bytes_;
    size_t            at_ = 0;
};

// Objects are known by the number of their making, which is the same on all ranks.
std::map<const llama_model *, int>   g_models;
std::map<const llama_context *, int> g_contexts;
int                                  g_n_models   = 0;
int                                  g_n_contexts = 0;
bool                                 g_inside     = false; // of oa_replay_load or _init: upstream's own body runs

bool leads() {
    return oa_ranks() && oa_ranks()->rank == 0;
}

void send(message & call) {
    uint64_t size = call.bytes().size();
    if (!oa_ranks()->broadcast(&size, sizeof(size)) || !oa_ranks()->broadcast(call.bytes().data(), size)) {
        LLAMA_LOG_ERROR("%s: a rank is gone\n", __func__);
    }
}

// What others cannot use: addresses of rank 0.
llama_model_params without_pointers(llama_model_params params) {
    params.devices                     = nullptr;
    params.tensor_buft_overrides       = nullptr;
    params.tensor_split                = nullptr;
    params.progress_callback           = nullptr;
    params.progress_callback_user_data = nullptr;
    params.kv_overrides                = nullptr;
    return params;
}

llama_context_params without_pointers(llama_context_params params) {
    params.cb_eval             = nullptr;
    params.cb_eval_user_data   = nullptr;
    params.abort_callback      = nullptr;
    params.abort_callback_data = nullptr;
    params.samplers            = nullptr;
    params.n_samplers          = 0;
    params.ctx_other           = nullptr;
    return params;
}

// What every rank makes by `make` and takes back by `undo` when one of them cannot; null then.
template <typename T, typename F>
T * make_on_all(const char * what, std::map<const T *, int> & known, int & n_made, F && make, void (*undo)(T *)) {
    g_inside          = true;
    T *        made   = make();
    int        failed = -1;
    const bool all    = oa_ranks()->all_ok(made != nullptr, &failed);
    if (!all && made) {
        LLAMA_LOG_ERROR("rank %d could not make its %s\n", failed, what);
        undo(made);
        made = nullptr;
    }
    g_inside = false;
    if (made) {
        known[made] = n_made++;
    }
    return made;
}

llama_model * make_model(const char * path, const llama_model_params & params) {
    const auto make = [&] { return llama_model_load_from_file(path, params); };
    return make_on_all<llama_model>("model", g_models, g_n_models, make, llama_model_free);
}

llama_context * make_context(llama_model * model, const llama_context_params & params) {
    const auto make = [&] { return llama_init_from_model(model, params); };
    return make_on_all<llama_context>("context", g_contexts, g_n_contexts, make, llama_free);
}

} // namespace

// ---- rank 0 --------------------------------------------------------------------------------------------------------

bool oa_replay_wanted(const llama_model_params & params) {
    if (!leads() || g_inside || params.split_mode != LLAMA_SPLIT_MODE_TENSOR || params.no_alloc || params.vocab_only) {
        return false;
    }
    return params.devices && params.devices[0] == oa_ranks()->devices[0];
}

bool oa_replay_wanted(const llama_model * model) {
    return leads() && !g_inside && g_models.count(model) > 0;
}

llama_model * oa_replay_load(const char * path, llama_model_params params) {
    if (params.tensor_buft_overrides && params.tensor_buft_overrides[0].pattern) {
        LLAMA_LOG_ERROR("overridden buffer types (-ot): not with a model that is spread over ranks\n");
        return nullptr;
    }
    message call;
    call.put(OA_REPLAY_LOAD).put(without_pointers(params));
    std::vector<float> split(llama_max_devices(), 0.0f);
    if (params.tensor_split) {
        split.assign(params.tensor_split, params.tensor_split + llama_max_devices());
    }
    call.put(split.data(), split.size());
    uint64_t n_overrides = 0;
    while (params.kv_overrides && params.kv_overrides[n_overrides].key[0] != 0) {
        ++n_overrides;
    }
    call.put(n_overrides).put(params.kv_overrides, n_overrides);
    const uint64_t length = std::strlen(path);
    call.put(length).put(path, length);
    send(call);
    return make_model(path, params);
}

llama_context * oa_replay_init(llama_model * model, llama_context_params params) {
    message call;
    call.put(OA_REPLAY_INIT).put(g_models.at(model)).put(without_pointers(params));
    send(call);
    return make_context(model, params);
}

void oa_replay_free(const llama_context * context) {
    const auto it = g_contexts.find(context);
    if (!leads() || it == g_contexts.end()) {
        return;
    }
    message call;
    call.put(OA_REPLAY_FREE).put(it->second);
    send(call);
    g_contexts.erase(it);
}

void oa_replay_free(const llama_model * model) {
    const auto it = g_models.find(model);
    if (!leads() || it == g_models.end()) {
        return;
    }
    message call;
    call.put(OA_REPLAY_FREE_MODEL).put(it->second);
    send(call);
    g_models.erase(it);
}

void oa_replay_process(const llama_context * context, llama_process_type type, const llama_batch_ext & batch) {
    const auto it = g_contexts.find(context);
    if (!leads() || it == g_contexts.end()) {
        return;
    }
    message call;
    call.put(OA_REPLAY_PROCESS).put(it->second).put(type);
    call.put(uint64_t(batch.n_embd)).put(uint64_t(batch.embd.size())).put(batch.embd.data(), batch.embd.size());
    call.put(uint64_t(batch.tokens.size()));
    for (const auto & token : batch.tokens) {
        call.put(token.id).put(token.has_embd).put(uint64_t(token.embd_off)).put(token.output).put(token.pos);
        call.put(uint64_t(token.seq_ids.size()));
        for (const llama_seq_id id : token.seq_ids) {
            call.put(id);
        }
    }
    send(call);
}

void oa_replay_tell(oa_replay_call call, const llama_context * context, int a) {
    const auto it = g_contexts.find(context);
    if (leads() && it != g_contexts.end()) {
        message m;
        m.put(call).put(it->second).put(a).put(0).put(0).put(0);
        send(m);
    }
}

void oa_replay_tell(oa_replay_call call, llama_memory_t memory, int a, int b, int c, int d) {
    if (!leads()) {
        return;
    }
    for (const auto & [context, number] : g_contexts) {
        if (llama_get_memory(context) == memory) {
            message m;
            m.put(call).put(number).put(a).put(b).put(c).put(d);
            send(m);
        }
    }
}

bool oa_replay_refuses(const llama_model * model, const char * what) {
    if (g_models.count(model) == 0) {
        return false;
    }
    LLAMA_LOG_ERROR("%s: not with a model that is spread over ranks\n", what);
    return true;
}

bool oa_replay_refuses(const llama_context * context, const char * what) {
    return g_contexts.count(context) > 0 && oa_replay_refuses(llama_get_model(context), what);
}

// ---- the other ranks -----------------------------------------------------------------------------------------------

namespace {

// What this rank has made, by number.
struct replayed {
    std::string                    path;
    int                            n_threads;
    std::map<int, llama_model *>   models;
    std::map<int, llama_context *> contexts;
};

void load(replayed & all, message & call) {
    auto       params   = call.get<llama_model_params>();
    const auto split    = call.get_many<float>(llama_max_devices());
    const auto n        = call.get<uint64_t>();
    auto       override = call.get_many<llama_model_kv_override>(n);
    const auto length   = call.get<uint64_t>();
    const auto name     = call.get_many<char>(length);
    override.push_back({});
    params.devices       = oa_ranks()->devices;
    params.tensor_split  = split.data();
    params.kv_overrides  = n > 0 ? override.data() : nullptr;
    const std::string as = all.path.empty() ? std::string(name.begin(), name.end()) : all.path;
    if (llama_model * model = make_model(as.c_str(), params)) {
        all.models[g_models.at(model)] = model;
    }
}

void init(replayed & all, message & call) {
    llama_model * model  = all.models.at(call.get<int>());
    auto          params = call.get<llama_context_params>();
    if (all.n_threads > 0) {
        params.n_threads = params.n_threads_batch = all.n_threads;
    }
    if (llama_context * context = make_context(model, params)) {
        all.contexts[g_contexts.at(context)] = context;
    }
}

void process(llama_context * context, message & call) {
    const auto      type = call.get<llama_process_type>();
    llama_batch_ext batch(context);
    batch.n_embd      = call.get<uint64_t>();
    const auto n_embd = call.get<uint64_t>();
    batch.embd        = call.get_many<float>(n_embd);
    batch.tokens.resize(call.get<uint64_t>());
    for (auto & token : batch.tokens) {
        token.id       = call.get<llama_token>();
        token.has_embd = call.get<bool>();
        token.embd_off = call.get<uint64_t>();
        token.output   = call.get<bool>();
        token.pos      = call.get<decltype(token.pos)>();
        const auto n   = call.get<uint64_t>();
        const auto ids = call.get_many<llama_seq_id>(n);
        token.seq_ids.insert(ids.begin(), ids.end());
    }
    llama_process(context, type, &batch);
}

// llama_set_warmup is deprecated for users; where rank 0's program still calls it, graphs must agree.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"

void repeat(llama_context * context, oa_replay_call which, message & call) {
    llama_memory_t memory = llama_get_memory(context);
    const auto     a = call.get<int>(), b = call.get<int>(), c = call.get<int>(), d = call.get<int>();
    switch (which) {
        case OA_REPLAY_CLEAR: return llama_memory_clear(memory, a);
        case OA_REPLAY_SEQ_RM: llama_memory_seq_rm(memory, a, b, c); return;
        case OA_REPLAY_SEQ_CP: return llama_memory_seq_cp(memory, a, b, c, d);
        case OA_REPLAY_SEQ_KEEP: return llama_memory_seq_keep(memory, a);
        case OA_REPLAY_SEQ_ADD: return llama_memory_seq_add(memory, a, b, c, d);
        case OA_REPLAY_SEQ_DIV: return llama_memory_seq_div(memory, a, b, c, d);
        case OA_REPLAY_SET_EMBEDDINGS: return llama_set_embeddings(context, a);
        case OA_REPLAY_SET_CAUSAL: return llama_set_causal_attn(context, a);
        case OA_REPLAY_SET_WARMUP: return llama_set_warmup(context, a);
        default: throw std::runtime_error("rank 0 speaks another version");
    }
}

#pragma GCC diagnostic pop

// False at the end, which rank 0 tells by an empty call.
bool replay_one(replayed & all) {
    uint64_t size = 0;
    if (!oa_ranks()->broadcast(&size, sizeof(size))) {
        throw std::runtime_error("rank 0 is gone");
    }
    if (size == 0) {
        return false;
    }
    std::vector<char> bytes(size);
    if (!oa_ranks()->broadcast(bytes.data(), bytes.size())) {
        throw std::runtime_error("rank 0 is gone");
    }
    message    call(std::move(bytes));
    const auto which = call.get<oa_replay_call>();
    if (which == OA_REPLAY_LOAD) {
        load(all, call);
    } else if (which == OA_REPLAY_INIT) {
        init(all, call);
    } else if (which == OA_REPLAY_FREE_MODEL) {
        const auto it = all.models.find(call.get<int>());
        llama_model_free(it->second);
        all.models.erase(it);
    } else {
        const auto it = all.contexts.find(call.get<int>());
        if (which == OA_REPLAY_FREE) {
            llama_free(it->second);
            all.contexts.erase(it);
        } else if (which == OA_REPLAY_PROCESS) {
            process(it->second, call);
        } else {
            repeat(it->second, which, call);
        }
    }
    return true;
}

} // namespace

std::string oa_replay_run(const std::string & path, int n_threads) {
    replayed    all{ path, n_threads, {}, {} };
    std::string error;
    try {
        while (replay_one(all)) {
        }
    } catch (const std::exception & caught) {
        error = caught.what();
    }
    for (auto & [number, context] : all.contexts) {
        llama_free(context);
    }
    for (auto & [number, model] : all.models) {
        llama_model_free(model);
    }
    return error;
}
