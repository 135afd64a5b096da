#include "revival.h"

#include "admission.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace oa {

namespace {

using std::chrono::seconds;

constexpr std::chrono::milliseconds at_least{ 500 }; // a server that is to end knows it by then
constexpr seconds                   most{ 60 };

bool switched_on() {
    const char * value = getenv("OALLAMA_REVIVE");
    return value && strcmp(value, "1") == 0;
}

} // namespace

// It is never destroyed: a second signal ends the process from within whatever a thread does.
Revival & Revival::of_process() {
    static Revival & revival = *new Revival;
    return revival;
}

void Revival::died(const std::string & model, Load load) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (stopping_ || !switched_on()) {
        return;
    }
    const auto before = deaths_.find(model);
    note(model, std::move(load), before != deaths_.end() && Clock::now() - before->second.last < 2 * most);
    if (!thread_.joinable()) {
        thread_ = std::thread([this] { work(); });
    }
    changed_.notify_all();
}

void Revival::note(const std::string & model, Load load, bool again) {
    Death & death = deaths_[model];
    death.wait    = again ? std::min(std::max(2 * death.wait, seconds(1)), most) : seconds(0);
    due_.insert({ Clock::now() + at_least + death.wait, { model, std::move(load) } });
}

void Revival::forget(const std::string & model) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto due = due_.begin(); due != due_.end();) {
        due = due->second.model == model ? due_.erase(due) : std::next(due);
    }
    if (loading_ == model) {
        loading_.clear();
    }
}

void Revival::stop() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        stopping_ = true;
        changed_.notify_all();
    }
    if (thread_.joinable()) {
        thread_.join();
    }
}

void Revival::work() {
    const auto should_stop = [this] { return stopping_ || Admission::of_process().ends(); };

    std::unique_lock<std::mutex> lock(mutex_);
    while (!stopping_) {
        if (due_.empty()) {
            changed_.wait(lock);
            continue;
        }
        if (due_.begin()->first > Clock::now()) {
            changed_.wait_until(lock, due_.begin()->first);
            continue;
        }
        Due due = std::move(due_.begin()->second);
        due_.erase(due_.begin());
        if (should_stop()) {
            continue;
        }
        loading_ = due.model;
        lock.unlock();
        std::string failure;
        fprintf(stderr, "oallama: %s died and is loaded again\n", due.model.c_str());
        try {
            due.load(should_stop);
        } catch (const std::exception & error) {
            failure = error.what();
        }
        lock.lock();
        const bool wanted = loading_ == due.model && !should_stop();
        loading_.clear();
        deaths_[due.model].last = Clock::now();
        if (!failure.empty() && wanted) {
            fprintf(stderr, "oallama: %s\n", failure.c_str());
            note(due.model, std::move(due.load), true);
        }
    }
}

} // namespace oa
