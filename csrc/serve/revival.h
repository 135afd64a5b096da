// Models of a router whose process dies are loaded again without being asked for: another model's guests may be in
// their memory. Hook of patch 0011; OALLAMA_REVIVE=1 switches it on.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <thread>

namespace oa {

class Revival {
  public:
    // Returns when the model is there, throws if it could not be loaded, and soon after this server is to end.
    using Load = std::function<void(const std::function<bool()> & should_stop)>;

    static Revival & of_process();

    // A model died that was ready, and nobody had asked it to end. It is loaded after half a second. Where it dies
    // again within two minutes, or cannot be loaded, it waits a second more, then two, up to a minute. Models are
    // loaded one after the other, and none where this server is to end by then.
    void died(const std::string & model, Load load);
    // Somebody wants it to end: it is not loaded again until it has died again.
    void forget(const std::string & model);
    // Nothing is loaded any more.
    void stop();

  private:
    using Clock = std::chrono::steady_clock;

    struct Death {
        Clock::time_point    last; // that it was loaded again
        std::chrono::seconds wait{ 0 };
    };

    struct Due {
        std::string model;
        Load        load;
    };

    Revival() = default;
    void note(const std::string & model, Load load, bool again);
    void work();

    std::mutex                            mutex_;
    std::condition_variable               changed_;
    std::map<std::string, Death>          deaths_;
    std::multimap<Clock::time_point, Due> due_;
    std::string                           loading_; // the model that is loaded now
    std::atomic<bool>                     stopping_{ false };
    std::thread                           thread_;
};

} // namespace oa
