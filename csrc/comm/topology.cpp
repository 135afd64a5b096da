#include "topology.h"

#include "comm_error.h"

#include <algorithm>
#include <cmath>
#include <sstream>

oa_topology oa_make_topology(const std::vector<oa_rank_place> & ranks) {
    if (ranks.empty()) {
        throw oa_comm_error("a topology needs at least one rank, got none");
    }
    oa_topology topology;
    for (size_t r = 0; r < ranks.size(); ++r) {
        if (!std::isfinite(ranks[r].speed) || ranks[r].speed <= 0) {
            throw oa_comm_error("the speed of rank " + std::to_string(r) + " must be a positive number, got " +
                                    std::to_string(ranks[r].speed),
                                int(r));
        }
        const auto same = [&](const oa_host & host) { return host.id == ranks[r].host; };
        auto       host = std::find_if(topology.hosts.begin(), topology.hosts.end(), same);
        if (host == topology.hosts.end()) {
            host = topology.hosts.insert(host, { ranks[r].host, {}, int(r) });
        }
        host->ranks.push_back(int(r));
        if (ranks[r].speed > ranks[size_t(host->lm)].speed) {
            host->lm = int(r);
        }
        topology.host_of.push_back(int(host - topology.hosts.begin()));
    }
    const auto slower = [&](const oa_host & x, const oa_host & y) {
        const double sx = ranks[size_t(x.lm)].speed;
        const double sy = ranks[size_t(y.lm)].speed;
        return sx < sy || (sx == sy && x.lm > y.lm);
    };
    topology.gm = int(std::max_element(topology.hosts.begin(), topology.hosts.end(), slower) - topology.hosts.begin());
    return topology;
}

size_t oa_topology::widest() const {
    size_t widest = 0;
    for (const oa_host & host : hosts) {
        widest = std::max(widest, host.ranks.size());
    }
    return widest;
}

std::string oa_topology::print() const {
    std::ostringstream out;
    for (const oa_host & host : hosts) {
        out << host.id << ": ranks";
        for (const int rank : host.ranks) {
            out << ' ' << rank;
        }
        out << ", LM " << host.lm << (&host == &hosts[size_t(gm)] ? ", GM" : "") << '\n';
    }
    return out.str();
}
