// Every execution of a channel's protocol (csrc/weave/ring.h, the code that runs) that release and acquire allow.
//
// A small stateless model checker. Words and payload live in a machine of views: a location keeps all its messages, a
// thread may read any that is not older than what it has seen, and a release carries what its thread has seen to who
// acquires it. Locations have one writer each, so all that matters is which message a load reads: an older one that is
// there, or one that is yet to come, for which the other thread runs. Executions are tried one after another by
// replaying choices.
//
// weave_model SCENARIO RULE [WORD release|acquire]: leaves out a rule ("all": none; "restore": none, and both sides
// repeat what they said), or weakens the accesses to a word. Prints what it found as JSON; the exit code says nothing.
#include "ring.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <ucontext.h>
#include <vector>

using namespace oa::weave;

namespace {

using View = std::map<size_t, size_t>; // location -> number of its oldest message that may be read

struct Message {
    uint64_t value;
    View     view; // of a release
};

struct Pruned {}; // what would follow has been tried already

constexpr size_t payload_at = 1 << 20, result_at = 2 << 20, epoch_at = 3 << 20, number_at = 4 << 20;

// One execution. Thread 0 is the sender, 1 the receiver.
class Machine {
  public:
    std::vector<size_t> & choices; // to be replayed, then extended
    std::vector<size_t>   options; // there were at each
    std::string           violation;
    size_t                weak_word    = 0;
    bool                  weak_release = false, weak_acquire = false;
    bool                  restores = false; // both sides say once more what they said

    explicit Machine(std::vector<size_t> & choices) : choices(choices) {}

    template <class T> T load_acquire(size_t word) { return T(load(word, !(weak_acquire && word == weak_word))); }

    template <class T> void store_release(size_t word, T value) {
        store(word, uint64_t(value), !(weak_release && word == weak_word));
    }

    uint64_t plain(size_t location) { return load(location, false); }
    void     plain(size_t location, uint64_t value) { store(location, value, false); }

    // A loop found nothing: it looks again when the other thread has written something, or can write no more.
    void spin() {
        if (++n_spins_[at_] > most_spins) {
            throw Pruned();
        }
        state_[at_] = Waits{ true, 0, stores_ };
        swap();
    }

    void require(bool holds, const char * what) {
        if (!holds && violation.empty()) {
            violation = what;
        }
    }

    void run(const std::function<void()> & sender, const std::function<void()> & receiver) {
        bodies_[0] = sender;
        bodies_[1] = receiver;
        for (int i = 0; i < 2; ++i) {
            getcontext(&fibers_[i]);
            stacks_[i].resize(1 << 16);
            fibers_[i].uc_stack.ss_sp   = stacks_[i].data();
            fibers_[i].uc_stack.ss_size = stacks_[i].size();
            fibers_[i].uc_link          = &main_;
            makecontext(&fibers_[i], reinterpret_cast<void (*)()>(&Machine::enter), 2, uint32_t(uintptr_t(this)),
                        uint32_t(uintptr_t(this) >> 32));
        }
        while (!pruned_ && violation.empty()) {
            int next = -1;
            for (int i = 0; i < 2 && next < 0; ++i) {
                next = may_run((last_ + i) % 2) ? (last_ + i) % 2 : -1;
            }
            for (int i = 0; i < 2 && next < 0; ++i) {
                if (!ended_[i] && state_[i].spins && latest_[i] < stores_) {
                    next       = i; // everything is there in the end, so it sees all of it now
                    latest_[i] = stores_;
                    for (const auto & [location, messages] : memory_) {
                        view_[i][location] = messages.size() - 1;
                    }
                }
            }
            if (next < 0) {
                const bool waits_for_choice = (!ended_[0] && !state_[0].spins) || (!ended_[1] && !state_[1].spins);
                require(ended_[0] || waits_for_choice, "the sender waits for ever");
                return;
            }
            at_ = last_ = next;
            swapcontext(&main_, &fibers_[next]);
        }
    }

  private:
    struct Waits {
        bool   spins    = false;
        size_t location = 0, seen = 0; // seen: of messages at the location, or of stores at all
    };

    static void enter(uint32_t low, uint32_t high) {
        auto * self = reinterpret_cast<Machine *>(uintptr_t(low) | (uintptr_t(high) << 32));
        try {
            self->bodies_[self->at_]();
        } catch (const Pruned &) {
            self->pruned_ = true;
        }
        self->ended_[self->at_] = true;
    }

    void swap() {
        const int me = at_;
        swapcontext(&fibers_[me], &main_);
        state_[me] = {};
    }

    bool may_run(int i) {
        const Waits & waits = state_[i];
        const bool    free  = waits.location == 0 && !waits.spins;
        return !ended_[i] && (free || (waits.spins ? stores_ > waits.seen : at(waits.location).size() > waits.seen));
    }

    std::vector<Message> & at(size_t location) {
        auto & messages = memory_[location];
        if (messages.empty()) {
            messages.push_back({ 0, {} });
        }
        return messages;
    }

    size_t choose(size_t n) {
        if (n == 1) {
            return 0;
        }
        if (options.size() == choices.size()) {
            choices.push_back(0);
        }
        options.push_back(n);
        return choices[options.size() - 1];
    }

    uint64_t load(size_t location, bool acquire) {
        for (;;) {
            const size_t oldest = std::max(view_[at_][location], skipped_[at_]), n = at(location).size();
            const size_t there = n - std::min(n, oldest);
            // What an execution may have is bounded: a thread waits for messages to come only so often.
            const bool may_wait = n_waits_[at_] < most_waits && !ended_[1 - at_];
            if (there == 0 && !may_wait) {
                throw Pruned();
            }
            const size_t choice = choose(there + may_wait);
            if (choice < there) {
                skipped_[at_]        = 0;
                const size_t number  = n - 1 - choice;
                view_[at_][location] = number;
                if (acquire) {
                    for (const auto & [other, seen] : at(location)[number].view) {
                        view_[at_][other] = std::max(view_[at_][other], seen);
                    }
                }
                return at(location)[number].value;
            }
            ++n_waits_[at_];
            skipped_[at_] = n; // to read one of these has been tried
            state_[at_]   = Waits{ false, location, n };
            swap();
        }
    }

    void store(size_t location, uint64_t value, bool release) {
        auto & messages      = at(location);
        view_[at_][location] = messages.size();
        messages.push_back({ value, release ? view_[at_] : View{} });
        ++stores_;
    }

    static constexpr int most_waits = 3, most_spins = 4;

    std::map<size_t, std::vector<Message>> memory_;
    View                                   view_[2];
    size_t                                 skipped_[2] = {}, stores_ = 0;
    size_t                                 latest_[2]  = {};
    int                                    n_waits_[2] = {}, n_spins_[2] = {};
    Waits                                  state_[2];
    bool                                   ended_[2] = {}, pruned_ = false;
    int                                    at_ = 0, last_ = 0;
    std::function<void()>                  bodies_[2];
    ucontext_t                             main_, fibers_[2];
    std::vector<char>                      stacks_[2];
};

struct NoCredit : AllRules {
    static constexpr bool credit = false;
};

struct NoAccepted : AllRules {
    static constexpr bool accepted = false;
};

struct NoEpoch : AllRules {
    static constexpr bool epoch = false;
};

struct NoWrap : AllRules {
    static constexpr bool wrap = false;
};

uint64_t result_of(uint64_t value) {
    return value ^ 0xff;
}

template <class Rules> struct Channel {
    static constexpr uint32_t n_slots = 2;

    Machine &                    machine;
    SenderRing<Machine, Rules>   sender{ machine, n_slots };
    ReceiverRing<Machine, Rules> receiver{ machine, n_slots };

    void attach(uint64_t epoch, uint32_t base) {
        sender.attach(epoch, base);
        while (!sender.accepted()) {
            machine.spin();
        }
    }

    // As Sender::begin_task and publish.
    uint32_t send(uint64_t value) {
        while (!sender.has_credit()) {
            machine.spin();
        }
        const uint32_t number = sender.next(), slot = sender.slot(number);
        machine.plain(payload_at + slot, value);
        machine.plain(epoch_at + slot, sender.epoch());
        machine.plain(number_at + slot, number);
        sender.publish();
        return number;
    }

    void receive(uint32_t number, uint64_t value) {
        if (machine.restores) {
            sender.restore(); // as Sender::await before a nap
        }
        while (!sender.completed(number)) {
            machine.spin();
        }
        machine.require(machine.plain(result_at + sender.slot(number)) == result_of(value), "a result is wrong");
    }

    // As Receiver::open_next, open and finish, for as long as there may be something to come.
    void serve(uint64_t last_epoch, uint32_t last) {
        while (receiver.epoch() != last_epoch || receiver.next() != last + 1) {
            if (receiver.is_new_epoch()) {
                receiver.accept();
            } else if (receiver.has_task()) {
                const uint32_t slot  = receiver.slot(receiver.next());
                const uint64_t epoch = machine.plain(epoch_at + slot), number = machine.plain(number_at + slot);
                const bool     is_next = receiver.is_next(epoch, uint32_t(number));
                const uint64_t value   = machine.plain(payload_at + slot);
                machine.require(!is_next || epoch == receiver.epoch(), "a void task was done");
                machine.plain(result_at + slot, is_next ? result_of(value) : ~0ull);
                receiver.finish();
                if (machine.restores) {
                    receiver.restore(); // as Receiver::beat
                }
            } else {
                machine.spin();
            }
        }
    }
};

// Three tasks through two slots, two of them under way at once, numbered across the wrap-around.
template <class Rules> void pipelined(Machine & machine) {
    Channel<Rules> channel{ machine };
    const uint32_t base = 0xfffffffeu;
    machine.run(
        [&] {
            channel.attach(7, base);
            const uint32_t a = channel.send(11), b = channel.send(12);
            if (!Rules::credit) { // who does not ask for credit sends on
                channel.send(13);
                channel.receive(a, 11);
                return;
            }
            channel.receive(a, 11);
            const uint32_t c = channel.send(13);
            channel.receive(b, 12);
            channel.receive(c, 13);
        },
        [&] { channel.serve(7, base + 3); });
}

// A sender gives up on a task and begins another epoch with the same numbers.
template <class Rules> void again(Machine & machine) {
    Channel<Rules> channel{ machine };
    machine.run(
        [&] {
            channel.attach(7, 0);
            channel.send(11);
            channel.attach(8, 0);
            const uint32_t b = channel.send(12);
            channel.receive(b, 12);
        },
        [&] { channel.serve(8, 1); });
}

// A slot still has a task of an older epoch when the tail moves over it: the receiver may see a tail before its epoch.
template <class Rules> void stale(Machine & machine) {
    Channel<Rules> channel{ machine };
    machine.run(
        [&] {
            machine.plain(payload_at + 1, 11);
            machine.plain(epoch_at + 1, 6);
            machine.plain(number_at + 1, 1);
            channel.attach(7, 0);
            channel.attach(8, 1);
            const uint32_t b = channel.send(12);
            channel.receive(b, 12);
        },
        [&] { channel.serve(8, 2); });
}

template <class Rules> void run(const std::string & scenario, Machine & machine) {
    if (scenario == "pipelined") {
        pipelined<Rules>(machine);
    } else if (scenario == "again") {
        again<Rules>(machine);
    } else {
        stale<Rules>(machine);
    }
}

size_t word_of(const std::string & name) {
    const std::map<std::string, size_t> words = { { "tail", word::tail },
                                                  { "done", word::done },
                                                  { "epoch", word::epoch },
                                                  { "base", word::base },
                                                  { "accepted", word::accepted } };
    return words.at(name);
}

} // namespace

int main(int argc, char ** argv) {
    const std::string   scenario = argv[1], rule = argv[2];
    std::vector<size_t> choices;
    size_t              n_executions = 0, n_violations = 0;
    std::string         first;
    for (;;) {
        Machine machine(choices);
        if (argc > 4) {
            machine.weak_word                                                               = word_of(argv[3]);
            (strcmp(argv[4], "release") == 0 ? machine.weak_release : machine.weak_acquire) = true;
        }
        machine.restores = rule == "restore";
        if (rule == "credit") {
            run<NoCredit>(scenario, machine);
        } else if (rule == "accepted") {
            run<NoAccepted>(scenario, machine);
        } else if (rule == "epoch") {
            run<NoEpoch>(scenario, machine);
        } else if (rule == "wrap") {
            run<NoWrap>(scenario, machine);
        } else {
            run<AllRules>(scenario, machine);
        }
        ++n_executions;
        n_violations += !machine.violation.empty();
        first = first.empty() ? machine.violation : first;
        choices.resize(machine.options.size());
        while (!choices.empty() && ++choices.back() == machine.options[choices.size() - 1]) {
            choices.pop_back();
        }
        if (choices.empty() || n_violations == 100) {
            break;
        }
    }
    printf("{\"executions\": %zu, \"violations\": %zu, \"first\": \"%s\"}\n", n_executions, n_violations,
           first.c_str());
}
