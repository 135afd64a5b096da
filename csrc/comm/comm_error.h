// The one exception of csrc/comm. The message names what was expected and what came.
#pragma once

#include <stdexcept>
#include <string>

class oa_comm_error : public std::runtime_error {
  public:
    // `rank`: who caused it, -1 when that is not one rank.
    explicit oa_comm_error(const std::string & what, int rank = -1) : std::runtime_error(what), rank_(rank) {}

    int rank() const { return rank_; }

  private:
    int rank_;
};
