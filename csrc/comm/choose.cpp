// The formulas. H hosts with up to q ranks, n bytes, alpha, B and gap between hosts, a, b and c (alone) inside. f is n
// as a stream of messages, so n/B where they are long, and (f/H) is n/H as such a stream.
//   a host's sum      LM alone: a + n/b + q n/c            slices: 2 (a + n/b)
//   to its ranks      a + n/b
// A stream of k messages of m bytes takes k max(2 gap, m/B); messages are at most OA_LARGEST_MESSAGE long.
//   star              2 (alpha + (H - 1) q f) + 3 P n/c, rank 0 takes in, adds up and gives out all
//   tree              2 (alpha + (H - 1) f) + H n/c
//   exchange          s (alpha + f + 2 n/c), s = log2 H, + 2 with a fold
//   rabenseifner      2 (alpha + (H - 1) (f/H) + n/c)
//   pipelined         all chunks of the slower of wire and host, one of the other, and the latencies once
#include "choose.h"

#include "operation.h"
#include "wire.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

namespace {

struct shape {
    double n, hosts, ranks;
    double wire_ratio; // bytes on the wire per byte
};

// Seconds of n values' bytes on a link. An LM receives while it sends, and its core does one after the other.
double stream(const shape & s, double n, const oa_links & l) {
    const double bytes    = n * s.wire_ratio;
    const double messages = std::max(1.0, std::ceil(bytes / OA_LARGEST_MESSAGE));
    return std::max(2 * messages * l.gap, bytes / l.bandwidth);
}

double host_sum(const shape & s, const oa_links & l, bool slices) {
    if (s.ranks == 1) {
        return 0;
    }
    return slices ? 2 * (l.a + s.n / l.b) : l.a + s.n / l.b + s.ranks * s.n / l.alone;
}

double host_copies(const shape & s, const oa_links & l) {
    return s.ranks == 1 ? s.n / l.alone : l.a + s.n / l.b;
}

// Latencies one after the other.
double steps(oa_algorithm algorithm, double hosts) {
    if (algorithm != OA_EXCHANGE) {
        return 2;
    }
    const double whole = std::floor(std::log2(hosts));
    return whole + (std::exp2(whole) < hosts ? 2 : 0);
}

// Without the latencies.
double between(oa_algorithm algorithm, const shape & s, const oa_links & l) {
    const double f = stream(s, s.n, l);
    switch (algorithm) {
        case OA_TREE: return 2 * (s.hosts - 1) * f + s.hosts * s.n / l.alone;
        case OA_EXCHANGE: return steps(OA_EXCHANGE, s.hosts) * (f + 2 * s.n / l.alone);
        default: return 2 * ((s.hosts - 1) * stream(s, s.n / s.hosts, l) + s.n / l.alone);
    }
}

double wire(oa_algorithm algorithm, const shape & s, const oa_links & l) {
    return s.hosts == 1 ? 0 : steps(algorithm, s.hosts) * l.alpha + between(algorithm, s, l);
}

oa_algorithm_time whole(oa_algorithm algorithm, const shape & s, const oa_links & l) {
    const bool slices = host_sum(s, l, true) < host_sum(s, l, false);
    return { algorithm, 0, slices, host_sum(s, l, slices) + wire(algorithm, s, l) + host_copies(s, l) };
}

// Of chunks that are about equally good the largest is taken: fewer hand-overs are less that the model does not know,
// such as ranks that share cores. Tuned with 8 ranks on 2 cores of an AMD EPYC, hosts as network namespaces: 480 KiB
// took as long as 60 KiB with two hosts at 1 Gbit, and half as long with four at 10.
constexpr double about_equal   = 1.03;
constexpr double largest_chunk = 512 * 1024;

// The inner algorithm in chunks.
oa_algorithm_time pipelined(const shape & s, const oa_links & l) {
    const oa_algorithm inside = s.hosts == 2 ? OA_EXCHANGE : OA_RABENSEIFNER;
    // A host's part of a chunk is whole messages.
    const double                   parts = inside == OA_EXCHANGE ? 1 : s.hosts;
    std::vector<oa_algorithm_time> found;
    for (double messages = 1; messages <= 8; messages *= 2) {
        const double largest  = messages * parts * double(OA_LARGEST_MESSAGE);
        const double n_chunks = std::ceil(s.n / largest);
        if (n_chunks <= 1 || (largest > largest_chunk && !found.empty())) {
            break;
        }
        const double chunk   = std::ceil(s.n / n_chunks / 256) * 256; // equal ones, of whole cache lines
        const shape  one     = { s.n / n_chunks, s.hosts, s.ranks, s.wire_ratio };
        const double latency = s.hosts == 1 ? 0 : steps(inside, s.hosts) * l.alpha;
        const double on_wire = s.hosts == 1 ? 0 : between(inside, one, l);
        const double in_host = host_sum(one, l, true) + host_copies(one, l); // the LM is busy with the wire
        const double seconds = latency + std::min(on_wire, in_host) + n_chunks * std::max(on_wire, in_host);
        found.push_back({ OA_PIPELINED, size_t(chunk), true, seconds });
    }
    if (found.empty()) {
        oa_algorithm_time only = whole(inside, s, l);
        only.algorithm         = OA_PIPELINED;
        return only;
    }
    const auto faster = [](const oa_algorithm_time & x, const oa_algorithm_time & y) { return x.seconds < y.seconds; };
    const auto best   = std::min_element(found.begin(), found.end(), faster);
    return *std::find_if(found.rbegin(), found.rend(),
                         [&](const oa_algorithm_time & p) { return p.seconds <= about_equal * best->seconds; });
}

} // namespace

oa_links oa_assumed_links() {
    return { 60e-6, 125e6, 10e-6, 30e-6, 4e9, 8e9, "assumed, not measured: 1 Gbit/s Ethernet" };
}

oa_algorithm_time oa_predict(oa_algorithm algorithm, size_t n_bytes, const oa_topology & topology,
                             const oa_links & links, double wire_ratio) {
    const shape s = { double(n_bytes), double(topology.n_hosts()), double(topology.widest()), wire_ratio };
    if (algorithm == OA_STAR) {
        const double remote = 2 * (links.alpha + (s.hosts - 1) * s.ranks * std::max(links.gap, s.n / links.bandwidth));
        return { OA_STAR, 0, false,
                 2 * links.a + (s.hosts == 1 ? 0 : remote) + 3 * double(topology.n_ranks()) * s.n / links.alone };
    }
    return algorithm == OA_PIPELINED ? pipelined(s, links) : whole(algorithm, s, links);
}

oa_algorithm_choice oa_choose(size_t n_bytes, const oa_topology & topology, const oa_links & links, double wire_ratio) {
    oa_algorithm_choice choice;
    for (const oa_algorithm algorithm : { OA_EXCHANGE, OA_RABENSEIFNER, OA_PIPELINED, OA_TREE, OA_STAR }) {
        choice.all.push_back(oa_predict(algorithm, n_bytes, topology, links, wire_ratio));
    }
    // Of equals the first: with one host all but the pipeline are the same. The star is there to be compared with; it
    // has no wire format.
    const auto faster = [](const oa_algorithm_time & x, const oa_algorithm_time & y) { return x.seconds < y.seconds; };
    choice.best       = *std::min_element(choice.all.begin(), choice.all.end() - 1, faster);
    return choice;
}

std::string oa_algorithm_choice::print() const {
    std::string text;
    for (const oa_algorithm_time & p : all) {
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
