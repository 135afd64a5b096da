// LM -> GM -> LM, as in the paper: every LM sends its host's sum to the GM, which adds up in the order of the hosts and
// sends the result back to all. Bytes over the GM's link: (H - 1) n in and out; over another LM's: n in and out.
#include "schedule.h"

namespace {

class oa_tree : public oa_schedule {
  public:
    oa_tree(oa_inter_host & net, const oa_lm_group & group) : oa_schedule(net, group) {}

  private:
    bool is_gm() const { return group_.me == group_.gm; }

    int    n_phases() const override { return 2; }
    size_t inbox_size(size_t chunk) const override { return wire_.size(chunk) * size_t(is_gm() ? group_.n() : 1); }
    size_t outbox_size(size_t chunk) const override { return wire_.size(chunk); }

    void post(flight & f) override {
        const size_t size = wire_.size(f.n);
        if (!is_gm()) {
            receive(f, 1, OA_DOWN, group_.gm, arrival(f), size);
            return;
        }
        for (int host = 0; host < group_.n(); ++host) {
            if (host != group_.me) {
                receive(f, 0, OA_UP, host, f.inbox.data() + size_t(host) * size, size);
            }
        }
    }

    // Values come straight to their place.
    char * arrival(flight & f) const { return wire_.format == OA_WIRE_NATIVE ? f.result : f.inbox.data(); }

    void enter(flight & f, int phase) override {
        const size_t size = wire_.size(f.n);
        if (phase == 0 && !is_gm()) {
            send(f, 0, OA_UP, group_.gm, wire_.pack(f.sum, f.n, f.outbox.data()), size);
        }
        if (phase == 1 && is_gm()) {
            std::vector<const char *> sums(size_t(group_.n()), nullptr);
            for (size_t host = 0; host < sums.size(); ++host) {
                sums[host] = f.inbox.data() + host * size;
            }
            sums[size_t(group_.me)] = wire_.pack(f.sum, f.n, f.outbox.data());
            wire_.sum(f.result, sums.data(), group_.n(), f.n);
            const char * wire = wire_.pack(f.result, f.n, f.outbox.data());
            for (int host = 0; host < group_.n(); ++host) {
                if (host != group_.me) {
                    send(f, 1, OA_DOWN, host, wire, size);
                }
            }
            wire_.unpack(wire, f.n, f.result);
        }
    }

    void finish(flight & f) override {
        if (!is_gm()) {
            wire_.unpack(arrival(f), f.n, f.result);
        }
    }
};

} // namespace

std::unique_ptr<oa_schedule> oa_make_tree(oa_inter_host & net, const oa_lm_group & group) {
    return std::make_unique<oa_tree>(net, group);
}
