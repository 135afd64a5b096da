#include "thread_trial.h"

#include <algorithm>

namespace {

constexpr double turn_s        = 40e-3; // of computing; what others do in turns of 10 ms evens out
constexpr int    turn_graphs   = 4;
constexpr double longest_s     = 0.1; // graphs that take longer are not tried: prompts, of which no two are alike
constexpr double first_pause_s = 0.25, most_pause_s = 2.0;
constexpr double rest_s = 0.5;  // after a longer pause both are tried again, the last answer first
constexpr double gain   = 0.03; // less is noise

} // namespace

bool ThreadTrial::takes_fewer(uint64_t kind, double now) {
    Kind &     found  = find(kind);
    const bool rested = now - found.used > rest_s;
    found.used        = now;
    if (rested || (!found.trying && now >= found.next)) {
        found.trying = true;
        found.turns  = {};
        found.fewer  = found.best;
    }
    current = &found;
    return found.fewer;
}

void ThreadTrial::took(double seconds) {
    Kind & kind = *current;
    kind.used += seconds;
    if (!kind.trying) {
        return;
    }
    if (seconds > longest_s) {
        kind.best = false;
        decide(kind);
        return;
    }
    Turn & turn = kind.turns[kind.fewer];
    turn.n_graphs += 1;
    turn.seconds += seconds;
    if (turn.n_graphs < turn_graphs || turn.seconds < turn_s) {
        return;
    }
    if (kind.turns[!kind.fewer].n_graphs == 0) {
        kind.fewer = !kind.fewer;
        return;
    }
    const bool before = kind.best;
    kind.best         = kind.turns[true].mean() < kind.turns[false].mean() * (1 - gain);
    if (kind.best != before) {
        kind.pause = 0.0;
    }
    decide(kind);
}

// What is best is used until the next trial.
void ThreadTrial::decide(Kind & kind) {
    kind.trying = false;
    kind.fewer  = kind.best;
    kind.pause  = std::clamp(2 * kind.pause, first_pause_s, most_pause_s);
    kind.next   = kind.used + kind.pause;
}

// Its record, or in place of the one that was used longest ago a new one, which begins with all threads.
ThreadTrial::Kind & ThreadTrial::find(uint64_t kind) {
    auto found = std::find_if(kinds.begin(), kinds.end(), [&](const Kind & each) { return each.kind == kind; });
    if (found == kinds.end()) {
        const auto is_older = [&](const Kind & a, const Kind & b) { return a.used < b.used; };
        found               = std::min_element(kinds.begin(), kinds.end(), is_older);
        *found              = {};
        found->kind         = kind;
    }
    return *found;
}
