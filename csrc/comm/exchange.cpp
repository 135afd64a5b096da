// LM <-> LM recursive doubling: in step s the hosts h and h ^ 2^s swap what they have and both add the lower host's
// first. Where H is not a power of two the hosts beyond the largest power p first hand their sums to host h - p and get
// the result from it at the end. With two hosts that is one step, and n bytes out and in: the lower bound.
#include "schedule.h"

namespace {

enum oa_move { FOLD_IN, SWAP, FOLD_OUT }; // FOLD_*: from or to a host beyond the power of two

struct oa_step {
    oa_move what;
    int     peer;
};

class oa_exchange : public oa_schedule {
  public:
    oa_exchange(oa_inter_host & net, const oa_lm_group & group) : oa_schedule(net, group) {
        int power = 1;
        while (2 * power <= group_.n()) {
            power *= 2;
        }
        folded_ = power < group_.n();
        beyond_ = group_.me >= power;
        if (beyond_) {
            steps_ = { { FOLD_IN, group_.me - power }, { FOLD_OUT, group_.me - power } };
            return;
        }
        const bool has_other = group_.me + power < group_.n();
        if (has_other) {
            steps_.push_back({ FOLD_IN, group_.me + power });
        }
        for (int bit = 1; bit < power; bit *= 2) {
            steps_.push_back({ SWAP, group_.me ^ bit });
        }
        if (has_other) {
            steps_.push_back({ FOLD_OUT, group_.me + power });
        }
    }

  private:
    int    n_phases() const override { return int(steps_.size()); }
    size_t inbox_size(size_t chunk) const override { return wire_.size(chunk); }
    size_t outbox_size(size_t chunk) const override { return wire_.size(chunk); }

    bool receives(const oa_step & step) const { return step.what == SWAP || (step.what == FOLD_OUT) == beyond_; }
    bool sends(const oa_step & step) const { return step.what == SWAP || !receives(step); }

    void listen(flight & f, int phase) {
        const oa_step & step = steps_[size_t(phase)];
        if (receives(step)) {
            receive(f, phase, step.what == FOLD_OUT ? OA_DOWN : OA_UP, step.peer, f.inbox.data(), wire_.size(f.n));
        }
    }

    void post(flight & f) override { listen(f, 0); }

    void enter(flight & f, int phase) override {
        if (phase > 0) {
            add(f, phase - 1);
            listen(f, phase);
        }
        const oa_step & step = steps_[size_t(phase)];
        if (sends(step)) {
            const char * wire = wire_.pack(held(f, phase), f.n, f.outbox.data());
            send(f, phase, step.what == FOLD_OUT ? OA_DOWN : OA_UP, step.peer, wire, wire_.size(f.n));
        }
    }

    // What this host has before a phase: its own sum until something was added.
    const char * held(const flight & f, int phase) const { return phase == 0 ? f.sum : f.result; }

    // What came in a phase joins what this host has.
    void add(flight & f, int phase) {
        const oa_step & step = steps_[size_t(phase)];
        if (!receives(step)) {
            return;
        }
        if (step.what == FOLD_OUT) {
            wire_.unpack(f.inbox.data(), f.n, f.result);
            return;
        }
        // In FOLD_IN nothing was sent, so nothing is packed yet.
        const char * mine   = step.what == SWAP && wire_.format != OA_WIRE_NATIVE ?
                                  f.outbox.data() :
                                  wire_.pack(held(f, phase), f.n, f.outbox.data());
        const char * both[] = { mine, f.inbox.data() };
        if (step.peer < group_.me) {
            std::swap(both[0], both[1]);
        }
        wire_.sum(f.result, both, 2, f.n);
    }

    void finish(flight & f) override {
        add(f, n_phases() - 1);
        // The hosts beyond have the result as it was sent: so must all.
        if (folded_ && !beyond_) {
            wire_.unpack(wire_.pack(f.result, f.n, f.outbox.data()), f.n, f.result);
        }
    }

    std::vector<oa_step> steps_;
    bool                 folded_; // H is not a power of two
    bool                 beyond_; // this host is beyond it
};

} // namespace

std::unique_ptr<oa_schedule> oa_make_exchange(oa_inter_host & net, const oa_lm_group & group) {
    return std::make_unique<oa_exchange>(net, group);
}
