// What other programs have needed of the CPUs for a while, from looks at how many of their threads run at a moment.
//
// Whoever asks this process for something runs a moment before it computes, and is no lasting load: the first look
// after a pause counts little, and what was before the pause is forgotten as if nothing had run in it.
#pragma once

#include <algorithm>

constexpr double oa_lasting_s = 0.5; // over which looks are averaged
constexpr double oa_one_look  = 0.1; // what one counts at most

// The new average. before: the last one. since: seconds since the look before. found: threads that others run now.
inline double oa_lasting_load(double before, double since, int found) {
    const double kept = 1.0 - std::min(1.0, since / oa_lasting_s);
    return before * kept + found * std::min(oa_one_look, since / oa_lasting_s);
}
