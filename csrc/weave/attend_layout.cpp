#include "attention.h"

namespace oa::weave {

namespace {

size_t aligned(size_t at) {
    return (at + 63) / 64 * 64;
}

} // namespace

AttendLayout::AttendLayout(const AttendTask & task) {
    const size_t n = task.n_rows;
    rows           = aligned(sizeof(AttendTask));
    sinks          = aligned(rows + task.n_sequences * sizeof(SequenceRows));
    q              = aligned(sinks + (task.has_sinks ? task.n_head * sizeof(float) : 0));
    k              = aligned(q + n * task.n_head * task.d_k * sizeof(float));
    v              = aligned(k + n * task.n_head_kv * task.d_k * sizeof(float));
    nbytes         = v + n * task.n_head_kv * task.d_v * sizeof(float);
}

} // namespace oa::weave
