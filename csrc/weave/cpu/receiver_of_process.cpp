#include "receiver_of_process.h"

#include "receiver.h"
#include "weave_hooks.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <string>

namespace {

std::shared_ptr<oa::weave::Receiver> owner;
std::atomic<oa::weave::Receiver *>   receiver{ nullptr };

constexpr uint32_t looks_at_once = 64; // are counted, so that threads seldom share a cache line for it

void look(oa::weave::Receiver & of_process) {
    static thread_local uint32_t n_looks = 0;
    if (++n_looks == looks_at_once) {
        of_process.looked(n_looks);
        n_looks = 0;
    }
    of_process.poll();
}

} // namespace

void oa_weave_graph(bool begins) {
    if (auto * of_process = receiver.load(std::memory_order_relaxed)) {
        of_process->graph(begins);
    }
}

void oa_weave_poll(void) {
    auto * of_process = receiver.load(std::memory_order_relaxed);
    if (of_process && of_process->polls_in_graphs()) {
        look(*of_process);
    }
}

void oa_weave_worked(int64_t n_multiply_adds) {
    auto * of_process = receiver.load(std::memory_order_relaxed);
    if (!of_process || of_process->part() == 0) {
        return;
    }
    static thread_local int64_t worked = 0;
    worked += n_multiply_adds;
    if (worked >= of_process->part()) {
        worked = 0;
        look(*of_process);
    }
}

int64_t oa_weave_rows(int64_t n_rows, int64_t multiple, int64_t multiply_adds_per_row) {
    auto *        of_process = receiver.load(std::memory_order_relaxed);
    const int64_t part       = of_process ? of_process->part() : 0;
    if (part == 0 || multiply_adds_per_row == 0) {
        return n_rows;
    }
    return std::max(multiple, part / multiply_adds_per_row / multiple * multiple);
}

namespace oa::weave {

std::shared_ptr<GuestReceiver> make_receiver(const std::string & path, const ReceiverOptions & options) {
    return std::make_shared<Receiver>(path, options);
}

void set_receiver(std::shared_ptr<GuestReceiver> wanted) {
    receiver.store(nullptr);
    owner = std::static_pointer_cast<Receiver>(std::move(wanted));
    receiver.store(owner.get());
}

bool receiver_stats(ReceiverStats & stats) {
    if (!owner) {
        return false;
    }
    stats = owner->stats();
    return true;
}

void set_receiver_from_environment() {
    static bool  done  = false;
    const char * given = getenv("OALLAMA_WEAVE_RECEIVER");
    if (done || !given) {
        return;
    }
    done                    = true;
    const std::string all   = given;
    const size_t      colon = all.find(':'), second = all.find(':', colon + 1);
    ReceiverOptions   options;
    char *            end        = nullptr;
    options.quota_nbytes         = colon == std::string::npos ? 0 : strtoull(all.c_str() + colon + 1, &end, 10);
    const std::string polls      = second == std::string::npos ? "parts" : all.substr(second + 1);
    const bool        known      = polls == "graphs" || polls == "operators" || polls == "parts";
    char *            after      = nullptr;
    const long long   part       = strtoll(polls.c_str(), &after, 10);
    const bool        given_part = part > 0 && *after == '\0';
    if ((!known && !given_part) || !end || (*end != '\0' && *end != ':') || end == all.c_str() + colon + 1) {
        throw ChannelError("OALLAMA_WEAVE_RECEIVER is path:bytes[:graphs, operators, parts or a number], got " + all);
    }
    options.polls = polls == "graphs" ? Polls::graphs : polls == "operators" ? Polls::operators : Polls::parts;
    options.part  = given_part ? part : options.part;
    set_receiver(std::make_shared<Receiver>(all.substr(0, colon), options));
}

} // namespace oa::weave
