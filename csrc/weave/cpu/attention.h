// The work of one attend task: append K and V of a sequence, then attention of its rows, one KV head at a time. An
// append task is its first half.
//
// The attention is ggml-cpu's own (patch 0010 makes three of its functions callable), cut as ggml-cpu would have cut it
// in the sender, or that of our kernels, row by row (own_attention.h): the same bits come out as if the sequence had
// never left.
#pragma once

#include "rules.h"
#include "store.h"

#include <vector>

namespace oa::weave {

// A task, checked: every size in it is sound and every sequence there, with room for its rows.
class AttendJob {
  public:
    // The payload has to stay as it is until the last item is done: the other side must not be able to change it.
    Status read(Kind kind, const char * payload, size_t nbytes, size_t result_nbytes, const Store & store);

    uint32_t n_items() const { return uint32_t(rows_.size()) * task_.n_head_kv; }
    size_t   result_nbytes() const { return answer_nbytes(task_); }

    // Items may run at once, in any order, each on one thread. out: the result's payload.
    void run(uint32_t item, float * out) const;

  private:
    struct Rows {
        SequenceRows     given;
        const Sequence * sequence;
        uint32_t         first; // of the task's rows
    };

    void append(const Rows & rows, uint32_t head) const;
    void attend(const Rows & rows, uint32_t head, float * out) const;

    AttendTask         task_ = {};
    std::vector<Rows>  rows_;
    std::vector<float> sinks_;
    const float *      q_ = nullptr;
    const float *      k_ = nullptr;
    const float *      v_ = nullptr;
};

} // namespace oa::weave
