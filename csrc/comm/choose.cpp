// The formulas. H hosts with up to q ranks, n bytes, alpha and B between hosts, a and b inside; f = n/B.
//   a host's sum      LM alone: a + q n/b            slices: 2 a + 2 n/b
//   to its ranks      a + n/b
//   star              2 (alpha + (H - 1) q f) + P n/b
//   tree              2 (alpha + (H - 1) f) + H n/b
//   exchange          s (alpha + f + 2 n/b), s = log2 H, + 2 with a fold
//   rabenseifner      2 alpha + 2 (1 - 1/H) f + 2 n/b
//   pipelined         the slower of the wire and the host for all of n, the other for one chunk, and a per chunk
#include "choose.h"

#include "operation.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

namespace {

struct shape {
    double n, hosts, ranks;
    double f; // seconds of the message on a link
};

double host_sum(const shape & s, const oa_links & l, bool slices) {
    if (s.ranks == 1) {
        return 0;
    }
    return slices ? 2 * l.a + 2 * s.n / l.b : l.a + s.ranks * s.n / l.b;
}

double host_copies(const shape & s, const oa_links & l) {
    return s.ranks == 1 ? s.n / l.b : l.a + s.n / l.b;
}

double exchange_steps(double hosts) {
    const double whole = std::floor(std::log2(hosts));
    return whole + (std::exp2(whole) < hosts ? 2 : 0);
}

double between(oa_algorithm algorithm, const shape & s, const oa_links & l) {
    if (s.hosts == 1) {
        return 0;
    }
    switch (algorithm) {
        case OA_TREE: return 2 * (l.alpha + (s.hosts - 1) * s.f) + s.hosts * s.n / l.b;
        case OA_EXCHANGE: return exchange_steps(s.hosts) * (l.alpha + s.f + 2 * s.n / l.b);
        default: return 2 * l.alpha + 2 * (1 - 1 / s.hosts) * s.f + 2 * s.n / l.b;
    }
}

// The best way to sum inside a host for messages of this size.
oa_prediction whole(oa_algorithm algorithm, const shape & s, const oa_links & l) {
    const bool slices = host_sum(s, l, true) < host_sum(s, l, false);
    return { algorithm, 0, slices, host_sum(s, l, slices) + between(algorithm, s, l) + host_copies(s, l) };
}

oa_prediction pipelined(const shape & s, const oa_links & l) {
    const oa_algorithm inside = s.hosts == 2 ? OA_EXCHANGE : OA_RABENSEIFNER;
    oa_prediction      best   = { OA_PIPELINED, 0, true, INFINITY };
    for (const double chunk : { 64.0 * 1024, 128.0 * 1024, 256.0 * 1024 }) {
        const double part     = std::min(1.0, chunk / std::max(s.n, 1.0));
        const shape  one      = { s.n * part, s.hosts, s.ranks, s.f * part };
        const double host_one = host_sum(one, l, true) + host_copies(one, l);
        const double wire_one = between(inside, one, l);
        const double n_chunks = std::ceil(1 / part);
        // A chunk's latencies are hidden behind the others; what stays is that every chunk is counted.
        const double host_all = (host_one - 3 * l.a) * n_chunks + (s.ranks == 1 ? 0 : 3 * l.a * n_chunks);
        const double wire_all = (wire_one - l.alpha * exchange_steps(2)) * n_chunks;
        const double seconds =
            wire_all > host_all ? wire_all + l.alpha + host_one + l.a * n_chunks : host_all + wire_one;
        if (seconds < best.seconds) {
            best.seconds = seconds;
            best.chunk   = size_t(chunk);
        }
    }
    return best;
}

} // namespace

oa_links oa_assumed_links() {
    return { 60e-6, 125e6, 8e-6, 4e9, "assumed, not measured: 1 Gbit/s Ethernet" };
}

oa_prediction oa_predict(oa_algorithm algorithm, size_t n_bytes, const oa_topology & topology, const oa_links & links,
                         double wire_ratio) {
    const shape s = { double(n_bytes), double(topology.n_hosts()), double(topology.widest()),
                      double(n_bytes) * wire_ratio / links.bandwidth };
    if (algorithm == OA_STAR) {
        const double remote = s.hosts == 1 ? 0 : 2 * (links.alpha + (s.hosts - 1) * s.ranks * s.f / wire_ratio);
        return { OA_STAR, 0, false, 2 * links.a + remote + double(topology.n_ranks()) * s.n / links.b };
    }
    return algorithm == OA_PIPELINED ? pipelined(s, links) : whole(algorithm, s, links);
}

oa_choice oa_choose(size_t n_bytes, const oa_topology & topology, const oa_links & links, double wire_ratio) {
    oa_choice choice;
    for (const oa_algorithm algorithm : { OA_EXCHANGE, OA_RABENSEIFNER, OA_PIPELINED, OA_TREE, OA_STAR }) {
        choice.all.push_back(oa_predict(algorithm, n_bytes, topology, links, wire_ratio));
    }
    // Of equals the first: with one host the stages between hosts are all the same. The star has no wire format.
    const auto faster = [](const oa_prediction & x, const oa_prediction & y) { return x.seconds < y.seconds; };
    choice.best       = *std::min_element(choice.all.begin(), choice.all.end() - 1, faster);
    return choice;
}

std::string oa_choice::print() const {
    std::string text;
    for (const oa_prediction & p : all) {
        char line[128];
        std::snprintf(line, sizeof(line), "%c %-12s %10.3f ms", p.algorithm == best.algorithm ? '*' : ' ',
                      oa_algorithm_name(p.algorithm), p.seconds * 1e3);
        text += line;
        if (p.chunk > 0) {
            text += ", chunks of " + std::to_string(p.chunk / 1024) + " KiB";
        }
        text += p.slices ? ", slices\n" : "\n";
    }
    return text;
}
