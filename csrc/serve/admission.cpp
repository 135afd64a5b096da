#include "admission.h"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <set>

namespace oa {

namespace {

using Clock = std::chrono::steady_clock;

constexpr double newest  = 0.1; // weight of the last request in the mean
constexpr int    grace_s = 5;   // between the end of the drain and the end of the process

double variable(const char * name, double otherwise) {
    const char * value = getenv(name);
    return value ? strtod(value, nullptr) : otherwise;
}

} // namespace

Admission & Admission::of_process() {
    static Admission admission;
    return admission;
}

bool Admission::counts(const std::string & path) {
    static const std::set<std::string> last_words = { "completion", "completions",   "responses",  "messages",
                                                      "infill",     "embedding",     "embeddings", "rerank",
                                                      "reranking",  "transcriptions" };
    return last_words.count(path.substr(path.rfind('/') + 1)) > 0;
}

Admission::Admission() :
    limit_(size_t(variable("OALLAMA_REQUEST_LIMIT", double(SIZE_MAX / 2)))),
    drain_s_(variable("OALLAMA_DRAIN_S", 0.0)) {}

Admission::Ticket Admission::enter() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (ending_ || n_ >= limit_) {
        return nullptr;
    }
    ++n_;
    return Ticket(this, [since = Clock::now()](Admission * admission) { admission->leave(since); });
}

void Admission::leave(Clock::time_point since) {
    std::lock_guard<std::mutex> lock(mutex_);
    mean_s_ += newest * (std::chrono::duration<double>(Clock::now() - since).count() - mean_s_);
    --n_;
    left_.notify_all();
}

std::string Admission::refusal() {
    std::lock_guard<std::mutex> lock(mutex_);
    return ending_ ? "the server ends: it takes no more requests" :
                     "the queue is full: " + std::to_string(limit_) + " requests are served or wait";
}

int Admission::retry_after_s() {
    std::lock_guard<std::mutex> lock(mutex_);
    const double seconds = ending_ ? 10.0 : mean_s_ / double(std::max<size_t>(n_, 1)); // until the next one leaves
    return int(std::clamp(std::ceil(seconds), 1.0, 60.0));
}

bool Admission::ends() {
    std::lock_guard<std::mutex> lock(mutex_);
    return ending_;
}

void Admission::drain() {
    std::unique_lock<std::mutex> lock(mutex_);
    ending_ = true;
    left_.wait_for(lock, std::chrono::duration<double>(drain_s_), [this] { return n_ == 0; });
}

DrainedShutdown::DrainedShutdown(std::function<void(int)> shutdown) : shutdown_(std::move(shutdown)) {
    sem_init(&wanted_, 0, 0);
    thread_ = std::thread([this] {
        while (sem_wait(&wanted_) != 0) { // interrupted
        }
        if (!abandoned_) {
            Admission::of_process().drain();
            shutdown_(0);
            end_in(grace_s);
        }
    });
}

DrainedShutdown::~DrainedShutdown() {
    abandoned_ = true; // read after the semaphore, if begin() was not called
    begin();
    thread_.join();
    sem_destroy(&wanted_);
}

void DrainedShutdown::begin() {
    sem_post(&wanted_);
}

void DrainedShutdown::end_in(int seconds) {
    timespec end;
    clock_gettime(CLOCK_REALTIME, &end);
    end.tv_sec += seconds;
    while (sem_timedwait(&wanted_, &end) != 0) { // the destructor posts
        if (errno == ETIMEDOUT) {
            fprintf(stderr, "oallama: the server ends without a client that does not read its answer\n");
            std::_Exit(0);
        }
    }
}

} // namespace oa
