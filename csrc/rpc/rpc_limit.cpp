#include "rpc_limit.h"

#include <algorithm>
#include <cmath>

namespace oa_rpc {

double failures::add(const std::string & address, double now) {
    for (auto it = known_.begin(); it != known_.end();) {
        it = now - it->second.last > FORGET_S ? known_.erase(it) : std::next(it);
    }
    if (known_.size() >= MOST && known_.count(address) == 0) {
        return LONGEST_S;
    }
    entry & one = known_.emplace(address, entry{ 0, now }).first->second;
    one.last    = now;
    one.count   = std::min(one.count + 1, 30);
    return std::min(FIRST_S * std::ldexp(1.0, one.count - 1), LONGEST_S);
}

} // namespace oa_rpc
