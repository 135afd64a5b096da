#include "probe.h"

#include "comm_error.h"
#include "mpi_call.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <sched.h>

namespace {

constexpr int repeats = 9;

struct measured {
    double alpha, beta, a, per_byte; // seconds, and seconds per byte
};

template <typename F> double median_seconds(F && action) {
    std::vector<double> times;
    for (int i = 0; i <= repeats; ++i) {
        const auto since = std::chrono::steady_clock::now();
        action();
        times.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - since).count());
    }
    times.erase(times.begin()); // the first one warms up
    std::nth_element(times.begin(), times.begin() + repeats / 2, times.end());
    return times[repeats / 2];
}

void wait(oa_host_stage & net) {
    const auto       since = std::chrono::steady_clock::now();
    std::vector<int> tickets;
    while (!net.idle()) {
        if (!net.poll(tickets)) {
            const auto waited = std::chrono::steady_clock::now() - since;
            net.check_timeout(std::chrono::duration<double>(waited).count());
            sched_yield();
        }
    }
}

// Round trips with another rank, which calls this too.
measured ping_pong(oa_host_stage & net, int peer, bool first) {
    std::vector<double> bytes, seconds;
    for (const size_t size : { size_t(1) << 10, size_t(1) << 13, size_t(1) << 16, size_t(1) << 18, size_t(1) << 20 }) {
        std::vector<char> data(size);
        const double      trip = median_seconds([&] {
            for (const bool sends : { first, !first }) {
                if (sends) {
                    net.send(OA_UP, peer, data.data(), size, 0);
                } else {
                    net.receive(OA_UP, peer, data.data(), size, 0);
                }
                wait(net);
            }
        });
        bytes.push_back(double(size));
        seconds.push_back(trip / 2);
    }
    measured m = {};
    oa_fit_line(bytes, seconds, m.alpha, m.beta);
    return m;
}

measured inside(bool alone, const std::function<void(size_t, bool)> & in_host) {
    constexpr size_t n = 1 << 18;
    measured         m = {};
    if (alone) {
        std::vector<float> from(n, 1.0f), to(n);
        m.per_byte = median_seconds([&] { std::memcpy(to.data(), from.data(), 4 * n); }) / (4 * n);
        return m;
    }
    // Values in, the LM's sum, values out: two hand-overs. With slices there are three, and each rank moves n three
    // times.
    m.a        = median_seconds([&] { in_host(64, false); }) / 2;
    m.per_byte = std::max(median_seconds([&] { in_host(n, true); }) - 3 * m.a, 1e-9) / (3 * 4 * n);
    return m;
}

} // namespace

void oa_fit_line(const std::vector<double> & bytes, const std::vector<double> & seconds, double & alpha,
                 double & beta) {
    double w = 0, wx = 0, wy = 0, wxx = 0, wxy = 0;
    for (size_t i = 0; i < bytes.size(); ++i) {
        const double weight = 1 / (seconds[i] * seconds[i]);
        w += weight;
        wx += weight * bytes[i];
        wy += weight * seconds[i];
        wxx += weight * bytes[i] * bytes[i];
        wxy += weight * bytes[i] * seconds[i];
    }
    const double spread = w * wxx - wx * wx;
    beta                = spread > 0 ? std::max(0.0, (w * wxy - wx * wy) / spread) : 0;
    alpha               = std::max(0.0, (wy - beta * wx) / w);
}

oa_links oa_probe(oa_host_stage & net, const oa_topology & topology, double timeout,
                  const std::function<void(size_t, bool)> & in_host) {
    const int       me   = net.rank();
    const oa_host & host = topology.hosts[size_t(topology.host_of[size_t(me)])];
    const int       gm   = topology.hosts[size_t(topology.gm)].lm;
    measured        mine = inside(host.ranks.size() == 1, in_host);
    for (const oa_host & other : topology.hosts) {
        if (other.lm != gm && (me == gm || me == other.lm)) {
            const measured pair = ping_pong(net, me == gm ? other.lm : gm, me == gm);
            mine.alpha          = std::max(mine.alpha, pair.alpha);
            mine.beta           = std::max(mine.beta, pair.beta);
        }
    }
    std::vector<measured> all(static_cast<size_t>(net.n_ranks()));
    MPI_Request           request;
    oa_mpi_check(
        MPI_Iallgather(&mine, sizeof(mine), MPI_BYTE, all.data(), sizeof(mine), MPI_BYTE, net.control(), &request),
        "gather the measurements");
    oa_mpi_wait(request, timeout, "gather the measurements");
    measured worst = {};
    for (const measured & m : all) {
        worst = { std::max(worst.alpha, m.alpha), std::max(worst.beta, m.beta), std::max(worst.a, m.a),
                  std::max(worst.per_byte, m.per_byte) };
    }
    const double never = 1e15; // bytes per second of a link that is not there, or too fast to be seen
    return { worst.alpha, worst.beta > 0 ? 1 / worst.beta : never, worst.a,
             worst.per_byte > 0 ? 1 / worst.per_byte : never, "measured by probe()" };
}
