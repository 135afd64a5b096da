// The phase inside a host: areas and progress counters in memory that its ranks share.
//
// Every rank counts, over the life of the phase, the chunks that it has put in, summed, given out as LM and taken out.
// Counters only grow and each is written by one rank. A rank with nothing to do sleeps on the host's event word; the
// word changes only when the last of the awaited ranks has counted a chunk, so a chunk costs a few wake-ups, not one
// per rank, and ranks that outnumber the cores do not spin. No wait is unbounded: see watch.h.
#pragma once

#include "operation.h"
#include "shared_memory.h"

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

// OA_INPUT: copied into the rank's input area; OA_SUM: its slice is in the sum area; OA_RESULT: the LM has put the
// result into the result area; OA_OUTPUT: copied out by the rank. On devices (intra_host_device.h) the same, started
// there; OA_CLOSED: the rank has let go of the others' device memory.
enum oa_shm_event { OA_INPUT, OA_SUM, OA_RESULT, OA_OUTPUT, OA_CLOSED, OA_N_EVENTS };

struct oa_shm_rank;
struct oa_shm_header;

class oa_intra_host {
  public:
    // `index`: this rank among the `n_ranks` of the host, `lm` the index of the LM. Areas are `area` bytes each.
    oa_intra_host(int index, int n_ranks, int lm, size_t area);

    static size_t segment_size(int n_ranks, size_t area);
    // Once, before anything below. Whoever made the shared memory is one of the ranks.
    oa_shared_memory & memory() { return memory_; }
    void               attached(); // it is mapped

    int    index() const { return index_; }
    int    n_ranks() const { return n_ranks_; }
    int    lm() const { return lm_; }
    bool   is_lm() const { return index_ == lm_; }
    size_t area() const { return area_; }
    char * input(int index) const { return areas_ + size_t(index) * area_; }
    char * sums() const { return areas_ + size_t(n_ranks_) * area_; }
    char * results() const { return areas_ + size_t(n_ranks_ + 1) * area_; }

    // The operation this rank is in, to be compared when all have put in their first chunk. A rank may be one operation
    // ahead.
    void         announce(const oa_operation & op);
    oa_operation announced(int index, uint64_t number) const;

    void     count(oa_shm_event event, uint64_t total);
    uint64_t counted(oa_shm_event event, int index) const;
    bool     reached(oa_shm_event event, uint64_t total); // by every rank that takes part in the event

    // The event word, to be read before looking for work; and sleeping until an event has happened after that, or for
    // at most 20 ms.
    uint32_t now() const;
    void     sleep(uint32_t seen);

    // Signs of life, for watch.h.
    void     beat();
    uint64_t beats(int index) const;
    int      pid(int index) const;

    // The first failure on this host; everybody's waits end with it. `rank`: the culprit, -1 for none.
    void fail(const std::string & what, int rank);
    bool failed() const;
    void throw_failure() const; // does nothing when there is none

  private:
    bool takes_part(oa_shm_event event, int index) const;

    const int        index_, n_ranks_, lm_;
    const size_t     area_;
    oa_shared_memory memory_;
    oa_shm_header *  header_            = nullptr;
    oa_shm_rank *    ranks_             = nullptr;
    char *           areas_             = nullptr;
    bool             slices_            = false;
    uint64_t         seen_[OA_N_EVENTS] = {}; // totals that are known to be reached
    int              spin_              = 0;
};
