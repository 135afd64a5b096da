// Reduce-scatter and all-gather over the LMs, after Rabenseifner: host h adds up part h of the hosts' sums, in the
// order of the hosts, and gives it to all. The parts go straight from host to host instead of by halving, so that any
// number of hosts is served alike, in two steps. Bytes over every link: 2 (1 - 1/H) n out and in, the lower bound.
#include "schedule.h"

#include <algorithm>

namespace {

class oa_rabenseifner : public oa_schedule {
  public:
    oa_rabenseifner(oa_inter_host & net, const oa_lm_group & group) : oa_schedule(net, group) {}

  private:
    // Part of host h of n values: whole q8 blocks and cache lines, so the last may be short or empty.
    size_t part(size_t n) const { return (n + size_t(group_.n()) * 32 - 1) / (size_t(group_.n()) * 32) * 32; }
    size_t begin_of(size_t n, int host) const { return std::min(n, size_t(host) * part(n)); }
    size_t count_of(size_t n, int host) const { return begin_of(n, host + 1) - begin_of(n, host); }
    size_t bytes(size_t n) const { return n * oa_wire{ wire_.dtype, OA_WIRE_NATIVE }.size(1); }

    int    n_phases() const override { return 2; }
    size_t inbox_size(size_t chunk) const override {
        return wire_.size(part(chunk)) * size_t(wire_.format == OA_WIRE_NATIVE ? group_.n() : 2 * group_.n());
    }
    size_t outbox_size(size_t chunk) const override { return wire_.size(part(chunk)) * size_t(group_.n()); }

    char * inbox(flight & f, int host) const { return f.inbox.data() + wire_.size(part(f.n)) * size_t(host); }
    char * outbox(flight & f, int host) const {
        return f.outbox.empty() ? nullptr : f.outbox.data() + wire_.size(part(f.n)) * size_t(host);
    }
    // Where a part of the result arrives: values in their place.
    char * arrival(flight & f, int host) const {
        return wire_.format == OA_WIRE_NATIVE ? f.result + bytes(begin_of(f.n, host)) : inbox(f, group_.n() + host);
    }

    // Every host begins with another one, lest all send to host 0 first.
    template <typename F> void for_others(F && f) const {
        for (int i = 1; i < group_.n(); ++i) {
            f((group_.me + i) % group_.n());
        }
    }

    void post(flight & f) override {
        const size_t mine = wire_.size(count_of(f.n, group_.me));
        for_others([&](int host) {
            receive(f, 0, OA_UP, host, inbox(f, host), mine);
            receive(f, 1, OA_DOWN, host, arrival(f, host), wire_.size(count_of(f.n, host)));
        });
    }

    const char * packed(flight & f, const char * values, int host) const {
        return wire_.pack(values + bytes(begin_of(f.n, host)), count_of(f.n, host), outbox(f, host));
    }

    void enter(flight & f, int phase) override {
        const int me = group_.me;
        if (phase == 0) {
            for_others(
                [&](int host) { send(f, 0, OA_UP, host, packed(f, f.sum, host), wire_.size(count_of(f.n, host))); });
            return;
        }
        std::vector<const char *> parts(size_t(group_.n()), nullptr);
        for (int host = 0; host < group_.n(); ++host) {
            parts[size_t(host)] = host == me ? packed(f, f.sum, me) : inbox(f, host);
        }
        const size_t n    = count_of(f.n, me);
        char *       mine = f.result + bytes(begin_of(f.n, me));
        wire_.sum(mine, parts.data(), group_.n(), n);
        const char * wire = packed(f, f.result, me);
        for_others([&](int host) { send(f, 1, OA_DOWN, host, wire, wire_.size(n)); });
        wire_.unpack(wire, n, mine);
    }

    void finish(flight & f) override {
        for_others([&](int host) {
            wire_.unpack(arrival(f, host), count_of(f.n, host), f.result + bytes(begin_of(f.n, host)));
        });
    }
};

} // namespace

std::unique_ptr<oa_schedule> oa_make_rabenseifner(oa_inter_host & net, const oa_lm_group & group) {
    return std::make_unique<oa_rabenseifner>(net, group);
}
