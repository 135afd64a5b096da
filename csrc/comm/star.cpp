#include "algorithms.h"
#include "sum.h"

#include <algorithm>
#include <sched.h>

namespace {

// Until all that was posted is done.
void wait(oa_inter_host & net, oa_watch & watch) {
    std::vector<int> tickets;
    // Rank 0 knows who is late, the others only that rank 0 is: they give it time to say so.
    const bool root = net.rank() == 0;
    while (!net.idle()) {
        if (net.poll(tickets)) {
            watch.progress();
            continue;
        }
        watch.look([](int) { return false; });
        net.check_timeout(root ? 2 * watch.waited() : watch.waited());
        sched_yield();
    }
}

} // namespace

void oa_run_star(oa_inter_host & net, oa_watch & watch, const oa_operation & op, char * buffer,
                 std::vector<char> & scratch) {
    const auto   dtype = oa_dtype(op.dtype);
    const size_t width = oa_dtype_size(dtype);
    const size_t block = OA_STAR_BLOCK / width;
    const auto   ranks = size_t(net.n_ranks());
    size_t       at    = 0;
    do { // no values are a block too: its empty messages are checked like others
        const size_t n    = std::min(block, size_t(op.n) - at);
        const size_t size = n * width;
        char *       mine = buffer + at * width;
        if (net.rank() == 0) {
            scratch.resize(std::max(scratch.size(), ranks * size));
            std::vector<const void *> values{ mine };
            for (size_t rank = 1; rank < ranks; ++rank) {
                values.push_back(scratch.data() + rank * size);
                net.receive(OA_UP, int(rank), scratch.data() + rank * size, size, 0);
            }
            wait(net, watch);
            oa_sum(dtype, mine, values.data(), int(ranks), n);
            for (size_t rank = 1; rank < ranks; ++rank) {
                net.send(OA_DOWN, int(rank), mine, size, 0);
            }
        } else {
            net.send(OA_UP, 0, mine, size, 0);
            wait(net, watch);
            net.receive(OA_DOWN, 0, mine, size, 0);
        }
        wait(net, watch);
        at += n;
    } while (at < op.n);
}
