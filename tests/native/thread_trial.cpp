// Fewer threads or more, by simulated times (csrc/base/thread_trial.h): thread_trial [N_KINDS] MORE FEWER [MORE
// FEWER]... Each pair: milliseconds of a graph by more threads and by fewer, for ten seconds. Odd kinds have them
// exchanged. More than one kind take turns. Prints a line per pair: for each kind the share of its graphs that fewer
// threads computed. A pair of 0 and MS is a pause; its line says who computes a graph of 1 ms after it, fewer being 1.
#include "thread_trial.h"

#include <cstdio>
#include <cstdlib>
#include <vector>

int main(int argc, char ** argv) {
    const bool  has_kinds = argc % 2 == 0;
    const int   n_kinds   = has_kinds ? std::atoi(argv[1]) : 1;
    ThreadTrial trial;
    double      now = 0.0;
    for (int i = has_kinds ? 2 : 1; i + 1 < argc; i += 2) {
        const double     ms[2] = { std::atof(argv[i]), std::atof(argv[i + 1]) };
        std::vector<int> n_graphs(n_kinds), n_fewer(n_kinds);
        if (ms[0] == 0.0) {
            now += ms[1] * 1e-3;
            std::printf("%d\n", trial.takes_fewer(0, now));
            trial.took(1e-3);
            continue;
        }
        for (const double begin = now; now - begin < 10.0;) {
            for (int kind = 0; kind < n_kinds; ++kind) {
                const bool   fewer   = trial.takes_fewer(kind, now);
                const double seconds = ms[fewer != bool(kind % 2)] * 1e-3;
                trial.took(seconds);
                now += seconds + 1e-4;
                n_graphs[kind] += 1;
                n_fewer[kind] += fewer;
            }
        }
        for (int kind = 0; kind < n_kinds; ++kind) {
            std::printf("%.3f ", n_fewer[kind] / double(n_graphs[kind]));
        }
        std::printf("\n");
    }
    return 0;
}
