#include "probe.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <sched.h>
#include <thread>

namespace {

constexpr int repeats = 9;

struct measured {
    double alpha, beta, gap, a, per_byte, alone; // seconds, and seconds per byte
};

template <typename F, typename G> double median_seconds(G && prepare, F && action) {
    std::vector<double> times;
    for (int i = 0; i <= repeats; ++i) {
        prepare();
        const auto since = std::chrono::steady_clock::now();
        action();
        times.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - since).count());
    }
    times.erase(times.begin()); // the first one warms up
    std::nth_element(times.begin(), times.begin() + repeats / 2, times.end());
    return times[repeats / 2];
}

template <typename F> double median_seconds(F && action) {
    return median_seconds([] {}, action);
}

// True when messages have come. Throws when a rank of this host or another host has failed.
bool poll(const oa_probe_context & c) {
    std::vector<int> tickets;
    c.watch.look([](int) { return false; });
    return c.net.poll(tickets);
}

void wait(const oa_probe_context & c) {
    while (!c.net.idle()) {
        if (poll(c)) {
            c.watch.progress();
        } else {
            c.net.check_timeout(c.watch.waited());
            sched_yield();
        }
    }
}

// Seconds of `n_messages` of `size` bytes, one way, with another rank, which calls this too.
double one_way(const oa_probe_context & c, int peer, bool first, int n_messages, size_t size) {
    c.scratch.resize(std::max(c.scratch.size(), size));
    const double round_trip = median_seconds([&] {
        for (const bool sends : { first, !first }) {
            for (int i = 0; i < n_messages; ++i) {
                if (sends) {
                    c.net.send(OA_UP, peer, c.scratch.data(), size, 0);
                } else {
                    c.net.receive(OA_UP, peer, c.scratch.data(), size, 0);
                }
            }
            wait(c);
        }
    });
    return round_trip / 2;
}

measured ping_pong(const oa_probe_context & c, int peer, bool first) {
    std::vector<double> bytes, seconds;
    for (const size_t size : { size_t(1) << 10, size_t(1) << 13, size_t(1) << 16, size_t(1) << 18, size_t(1) << 20 }) {
        bytes.push_back(double(size));
        seconds.push_back(one_way(c, peer, first, 1, size));
    }
    measured m = {};
    oa_fit_line(bytes, seconds, m.alpha, m.beta);
    constexpr int many = 9;
    m.gap              = std::max(0.0, (one_way(c, peer, first, many, 1 << 10) - seconds[0]) / (many - 1));
    return m;
}

measured inside(size_t n_ranks, bool is_lm, const std::function<void(size_t, bool)> & in_host) {
    constexpr size_t n     = 1 << 18;
    constexpr double bytes = 4 * n;
    measured         m     = {};
    if (n_ranks == 1) {
        std::vector<float> from(n, 1.0f), to(n);
        m.per_byte = m.alone = median_seconds([&] { std::memcpy(to.data(), from.data(), 4 * n); }) / bytes;
        return m;
    }
    // While the wire is busy the ranks of a host fall asleep: so they are let to, until their LM comes. Then it has
    // their values, wakes them with the sum, and waits for them to come back.
    const auto late = [&] {
        if (is_lm) {
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
    };
    const double hand_overs = median_seconds(late, [&] {
        in_host(64, false);
        in_host(64, false);
    });
    m.a                     = is_lm ? hand_overs / 2 : 0;
    // Each rank copies its values, sums a slice of all and copies the result; or the LM sums and the others copy.
    m.per_byte         = median_seconds([&] { in_host(n, true); }) / (3 * bytes);
    const double by_lm = median_seconds([&] { in_host(n, false); });
    m.alone            = std::max(by_lm - 2 * bytes * m.per_byte, by_lm / 10) / (double(n_ranks) * bytes);
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

oa_links oa_probe(const oa_probe_context & context) {
    const oa_topology & topology = context.topology;
    const int           me       = context.net.rank();
    const oa_host &     host     = topology.hosts[size_t(topology.host_of[size_t(me)])];
    const int           gm       = topology.hosts[size_t(topology.gm)].lm;
    measured            mine     = inside(host.ranks.size(), me == host.lm, context.in_host);
    for (const oa_host & other : topology.hosts) {
        if (other.lm != gm && (me == gm || me == other.lm)) {
            const measured pair = ping_pong(context, me == gm ? other.lm : gm, me == gm);
            mine.alpha          = std::max(mine.alpha, pair.alpha);
            mine.beta           = std::max(mine.beta, pair.beta);
            mine.gap            = std::max(mine.gap, pair.gap);
        }
    }
    measured worst = {};
    for (const measured & m : context.net.gather(mine, "gather the measurements", [&] { poll(context); })) {
        worst = {
            std::max(worst.alpha, m.alpha), std::max(worst.beta, m.beta),         std::max(worst.gap, m.gap),
            std::max(worst.a, m.a),         std::max(worst.per_byte, m.per_byte), std::max(worst.alone, m.alone)
        };
    }
    // Of a link that is not there, or too fast to be seen.
    const auto rate = [](double seconds_per_byte) { return seconds_per_byte > 0 ? 1 / seconds_per_byte : 1e15; };
    return { worst.alpha,       rate(worst.beta),     worst.gap, worst.a, rate(worst.per_byte),
             rate(worst.alone), "measured by probe()" };
}
