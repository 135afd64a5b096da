// The order of a micro-batch's rows: local ones first, then those of each guest together.
#pragma once

#include "llama-batch.h"

#include <algorithm>
#include <numeric>
#include <vector>

namespace oa::weave {

// Sorts the rows by order(sequence), equal ones as they were. `outputs` are llama_batch_allocr's, which has just made
// the micro-batch: its last entries say which tokens of the batch the rows with an output are.
template <typename Order> void sort_rows(llama_ubatch & ubatch, std::vector<int32_t> & outputs, const Order & order) {
    std::vector<size_t> rows(ubatch.n_tokens);
    std::iota(rows.begin(), rows.end(), size_t(0));
    std::stable_sort(rows.begin(), rows.end(),
                     [&](size_t a, size_t b) { return order(ubatch.seq_id[a][0]) < order(ubatch.seq_id[b][0]); });

    // The micro-batch points into its data: values move, vectors stay. A row has `width` values from `first` on.
    const auto sort = [&](auto & values, size_t first, size_t width) {
        const auto from = values.begin() + first;
        const auto old  = std::vector(from, from + rows.size() * width);
        for (size_t i = 0; i < rows.size(); ++i) {
            std::copy_n(old.begin() + rows[i] * width, width, from + i * width);
        }
    };
    llama_ubatch::data_t & data = *ubatch.data;
    sort(data.token, 0, 1);
    sort(data.embd, 0, rows.empty() ? 0 : data.embd.size() / rows.size());
    for (uint32_t section = 0; section < ubatch.n_pos; ++section) {
        sort(data.pos, section * rows.size(), 1);
    }
    sort(data.n_seq_id, 0, 1);
    sort(data.seq_id, 0, 1);
    sort(data.output, 0, 1);
    sort(data.batch_idxs, 0, 1);

    outputs.resize(outputs.size() -
                   size_t(std::count_if(data.output.begin(), data.output.end(), [](int8_t o) { return o; })));
    for (size_t i = 0; i < rows.size(); ++i) {
        if (data.output[i]) {
            outputs.push_back(data.batch_idxs[i]);
        }
    }
}

} // namespace oa::weave
