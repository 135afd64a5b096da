// llama.cpp's KV cache of the hot model, some of whose sequences are guests: their K, V and attention are with
// receivers.
//
// A sequence of a number from `first_guest` on becomes a guest when its first token comes and a receiver has room; it
// stays where it is until it ends, or its receiver fails. Cells of the cache hold the others alone. In a micro-batch
// the rows of guests come last, a sequence after the other. The first of them are those of sequences that begin with
// this micro-batch. Their attention needs no others, so it is computed here, and the receiver is given K and V alone.
//
// A guest whose receiver has failed, wants its memory back, or has no more room is *lost*: its tokens are known, so
// they are computed anew in the local cache before the batch in which that came to light is computed once more
// (guest_decode.cpp). Nothing of it is seen outside but time.
#pragma once

#include "guest_channels.h"
#include "guest_context.h"
#include "guest_totals.h"
#include "llama-kv-cache.h"

#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

namespace oa::weave {

struct GuestStats {
    uint64_t n_guests   = 0; // sequences that became guests
    uint64_t n_lost     = 0; // of them, that were computed anew here
    uint64_t n_rows     = 0; // rows of layers whose attention was computed elsewhere
    uint64_t n_appended = 0; // rows of layers of which K and V alone were sent
    double   waited_s   = 0; // for results, and for slots that are free
};

class GuestCache;

// What a custom operator of the graph is told of its layer.
struct GuestLayer {
    GuestCache * cache;
    AttendTask   task;
};

class GuestCache : public llama_kv_cache {
  public:
    template <class... Arguments>
    GuestCache(GuestOptions options, bool own_attention, const llama_hparams & hparams, Arguments &&... arguments) :
        llama_kv_cache(std::forward<Arguments>(arguments)...), options_(std::move(options)), hparams_(hparams),
        own_attention_(own_attention), layers_(hparams.n_layer()), channels_(options_, shape(), device()) {}

    ~GuestCache() override;

    llama_memory_context_ptr init_batch(llama_batch_allocr & balloc, uint32_t n_ubatch, bool embd_all) override;

    bool get_can_shift() const override { return false; }

    void      clear(bool data) override;
    bool      seq_rm(llama_seq_id seq_id, llama_pos p0, llama_pos p1) override;
    void      seq_cp(llama_seq_id from, llama_seq_id to, llama_pos p0, llama_pos p1) override;
    void      seq_keep(llama_seq_id seq_id) override;
    llama_pos seq_pos_min(llama_seq_id seq_id) const override;
    llama_pos seq_pos_max(llama_seq_id seq_id) const override;
    void      state_write(llama_io_write_i & io, llama_seq_id seq_id, llama_state_seq_flags flags) const override;
    void      state_read(llama_io_read_i & io, llama_seq_id seq_id, llama_state_seq_flags flags) override;

    bool is_guest(llama_seq_id seq_id) const { return guests_.count(seq_id) != 0; }
    // Whether a receiver has room for so many tokens more; attaches to one where that is due.
    bool has_room(uint32_t n_tokens);

    // The tokens of a guest that is lost, which is then none any more; empty otherwise.
    std::vector<llama_token> take_back(llama_seq_id seq_id);
    // They could not be computed here: it is lost as before.
    void put_back(llama_seq_id seq_id, std::vector<llama_token> tokens);
    bool is_lost(llama_seq_id seq_id) const;

    // Notes the rows of guests of the micro-batch that is computed next.
    void apply_guests(const llama_ubatch & ubatch, uint32_t n_local, uint32_t n_new);

    // Of that micro-batch: the number of the sender that is on the device of the cache; 0: none.
    uint32_t sender_number() const { return sender_number_; }
    // The one that has all of the cache; null: there are several.
    ggml_backend_dev_t device() const;
    // The number of our kernel that a layer attends by (own_attention.h); 0: ggml's.
    uint32_t own_attention(const AttendTask & of_layer) const;
    // Its graphs have ended: guests of a receiver that has failed meanwhile are lost.
    void look_after_device();

    // In the graph, on the CPU: rows of a layer leave, results come into `wanted.out`. Where a receiver fails they are
    // zero and its guests are lost. n_threads: of the operator.
    void send(const Attention & wanted, uint32_t n_threads);
    void receive();
    // K and V of the rows of sequences that begin here leave. It waits only where all slots are taken.
    void append(const Attention & wanted);

    GuestLayer & layer(int il) { return layers_[size_t(il)]; }
    GuestStats   stats() const;

    bool         decoding    = false; // guest_decode.cpp is at work,
    llama_seq_id coming_home = -1;    // on a sequence that must not become a guest again

  private:
    struct Guest {
        size_t                   channel;
        Handle                   handle;
        uint32_t                 n_reserved = 0;
        std::vector<llama_token> tokens;
        bool                     lost = false;
    };

    struct Part { // of a micro-batch: the rows with one receiver
        size_t                    channel;
        uint32_t                  first, n_rows;
        std::vector<SequenceRows> rows;
    };

    // llama.cpp's flash attention rounds a cache of f32 to f16 first.
    static ggml_type kept_as(ggml_type type) { return type == GGML_TYPE_F32 ? GGML_TYPE_F16 : type; }

    bool     becomes_guest(llama_seq_id seq_id);
    OpenTask shape() const;
    void     look_after_channels();
    void     lose(Guest & guest, Loss why);
    void     lose_guests_of(size_t channel, Loss why);
    bool     has_room(Guest & guest, uint32_t n_tokens);
    void     let_go(Guest & guest, uint32_t n_tokens);
    int32_t  order_of(llama_seq_id seq_id, bool is_new) const;

    std::set<llama_seq_id> new_guests(const llama_ubatch & ubatch) const;
    std::vector<Part>      parts_of(const llama_ubatch & ubatch, uint32_t begin, uint32_t end) const;

    const GuestOptions            options_;
    const llama_hparams &         hparams_;
    const bool                    own_attention_;
    std::map<llama_seq_id, Guest> guests_;
    std::vector<GuestLayer>       layers_;
    GuestChannels                 channels_;
    GuestStats                    stats_;
    uint64_t                      told_waited_ns_ = 0; // to guest_totals()

    // Of the micro-batch that is computed.
    std::vector<Part> new_parts_, parts_; // of sequences that begin, and of the others
    uint32_t          sender_number_ = 0;
    uint32_t          n_rows_        = 0; // guests' and others
    float *           out_           = nullptr;
    size_t            out_row_       = 0;
};

} // namespace oa::weave
