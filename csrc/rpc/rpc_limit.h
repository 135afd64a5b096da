// How long a failed attempt to get in is left waiting, by the address it came from. Right answers never wait.
#pragma once

#include <map>
#include <string>

namespace oa_rpc {

class failures {
  public:
    static constexpr double FIRST_S   = 0.25;
    static constexpr double LONGEST_S = 4.0;
    static constexpr double FORGET_S  = 60.0; // after the last failure
    static constexpr size_t MOST      = 1024; // addresses remembered

    // Notes a failure; returns the seconds until it may be told: twice as long as the time before.
    double add(const std::string & address, double now);

  private:
    struct entry {
        int    count;
        double last;
    };
    std::map<std::string, entry> known_;
};

} // namespace oa_rpc
