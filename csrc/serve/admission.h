// Which requests a llama-server takes: no more at once than it has been told to, and none once it is to end; those it
// has taken are answered first. Hook of patch 0011, for single servers and for routers.
//
// OALLAMA_REQUEST_LIMIT: requests that occupy a model (completions, embeddings, ..) at once, served and waiting.
// OALLAMA_DRAIN_S: seconds that they have to come to an end when the server is to stop. Without these variables nothing
// is refused and a server that is to stop does so at once, as upstream's.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <semaphore.h>
#include <string>
#include <thread>

namespace oa {

class Admission {
  public:
    using Ticket = std::shared_ptr<void>; // an answer holds it until just before its last part

    static Admission & of_process();
    static bool        counts(const std::string & path);

    // Null: too many, or the server ends.
    Ticket enter();
    // Why enter() said no, and after how many seconds it may be worth another try.
    std::string refusal();
    int         retry_after_s();

    // Whether drain() has begun.
    bool ends();
    // From now on nobody is let in. Returns when nobody is left, or after OALLAMA_DRAIN_S.
    void drain();

  private:
    Admission();
    void leave(std::chrono::steady_clock::time_point since);

    const size_t            limit_;
    const double            drain_s_;
    std::mutex              mutex_;
    std::condition_variable left_;
    size_t                  n_      = 0;
    double                  mean_s_ = 1.0; // of a request, from taken to answered
    bool                    ending_ = false;
};

// A shutdown handler that drains first, on a thread of its own: begin() may be called by a signal handler.
class DrainedShutdown {
  public:
    explicit DrainedShutdown(std::function<void(int)> shutdown);
    ~DrainedShutdown();

    DrainedShutdown(const DrainedShutdown &)             = delete;
    DrainedShutdown & operator=(const DrainedShutdown &) = delete;

    void begin();

  private:
    // Ends the process unless it has done so itself: a client that does not read its answer would keep it.
    void end_in(int seconds);

    const std::function<void(int)> shutdown_;
    sem_t                          wanted_;
    std::atomic<bool>              abandoned_{ false }; // the server ends without begin()
    std::thread                    thread_;
};

} // namespace oa
