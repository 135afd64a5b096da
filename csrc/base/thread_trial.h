// Whether fewer threads compute a graph sooner than more do, found by using both in turn.
//
// Beside a program that needs a CPU for a part of the time, all threads are best where computing is what takes time,
// and one less where memory is, or where there are many. No number says which. Graphs of a kind are computed again and
// again, once a token. So both are tried for some graphs each, and again later, less often while the answer stays.
// After a pause the last answer goes first.
#pragma once

#include <array>
#include <cstdint>

class ThreadTrial {
  public:
    // How a graph that begins now is to be computed. kind: what is alike has the same one, and the same two numbers of
    // threads. now: seconds of oa_now().
    bool takes_fewer(uint64_t kind, double now);

    // The graph that was asked for last took so long. Not to be called for one that was not computed.
    void took(double seconds);

  private:
    struct Turn {
        int    n_graphs = 0;
        double seconds  = 0.0;

        double mean() const { return seconds / n_graphs; }
    };

    struct Kind {
        uint64_t            kind   = 0;
        double              used   = -1e9;
        bool                trying = true;
        bool                fewer  = false; // what is used now
        bool                best   = false; // what won last
        double              next   = 0.0;   // when both are tried again
        double              pause  = 0.0;   // until then, after the last trial
        std::array<Turn, 2> turns;
    };

    Kind & find(uint64_t kind);
    void   decide(Kind & kind);

    std::array<Kind, 16> kinds;
    Kind *               current = nullptr;
};
