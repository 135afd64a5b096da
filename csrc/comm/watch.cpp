#include "watch.h"

#include "comm_error.h"

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>

namespace {

double seconds_between(std::chrono::steady_clock::time_point from, std::chrono::steady_clock::time_point to) {
    return std::chrono::duration<double>(to - from).count();
}

} // namespace

oa_watch::oa_watch(oa_intra_host & shm, std::vector<int> ranks, std::string host, double timeout, double silence) :
    shm_(shm), ranks_(std::move(ranks)), host_(std::move(host)), timeout_(timeout), silence_(silence),
    beats_(ranks_.size()), alive_(ranks_.size()) {}

void oa_watch::begin(const oa_operation & op) {
    op_       = op;
    moved_    = false;
    progress_ = looked_ = clock::now();
    std::fill(alive_.begin(), alive_.end(), progress_);
}

double oa_watch::waited() const {
    return seconds_between(progress_, looked_);
}

void oa_watch::look(const std::function<bool(int)> & behind) {
    shm_.throw_failure();
    const auto now = clock::now();
    if (seconds_between(looked_, now) < 0.02) {
        return;
    }
    shm_.beat();
    looked_ = now;
    if (moved_) {
        progress_ = now;
        moved_    = false;
    }
    for (size_t i = 0; i < ranks_.size(); ++i) {
        const uint64_t beats = shm_.beats(int(i));
        if (beats != beats_[i]) {
            beats_[i] = beats;
            alive_[i] = now;
        }
        if (int(i) == shm_.index() || !behind(int(i))) {
            continue;
        }
        if (kill(shm_.pid(int(i)), 0) != 0 && errno == ESRCH) {
            give_up(int(i), "has ended");
        }
        char         text[64];
        const double silent = seconds_between(std::max(alive_[i], progress_), now);
        if (silent > silence_) {
            std::snprintf(text, sizeof(text), "has not answered for %.1f s", silent);
            give_up(int(i), text);
        }
        // Not for what others keep it from: the rank that has put in less than this one is the one that is late.
        const bool late = shm_.counted(OA_INPUT, int(i)) < shm_.counted(OA_INPUT, shm_.index());
        if (late && waited() > timeout_) {
            std::snprintf(text, sizeof(text), "is alive but has not come for %.1f s", waited());
            give_up(int(i), text);
        }
    }
}

void oa_watch::give_up(int index, const std::string & why) {
    const int rank = ranks_[size_t(index)];
    throw oa_comm_error("rank " + std::to_string(rank) + " of host " + host_ + " (process " +
                            std::to_string(shm_.pid(index)) + ") " + why + " in " + op_.print(),
                        rank);
}
