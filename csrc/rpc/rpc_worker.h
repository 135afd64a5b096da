// The process that serves clients, one after another, on the devices; and how its supervisor hands them over.
//
// The supervisor touches no device and parses no command. It forks a worker, which makes the backends and says that it
// is ready, and passes it the socket of one client at a time. What breaks while a client is served breaks the worker
// only. A worker that has held memory for a client ends after it: the kernel takes everything back.
#pragma once

namespace oa_rpc {

// ---- in the supervisor ---------------------------------------------------------------------------------------------

class worker {
  public:
    enum class state { none, starting, ready, serving };

    ~worker();

    // True in the new process, which has to go on and serve; false in the supervisor. Throws std::runtime_error.
    bool start();

    // For poll(): readable when the worker got ready or ended.
    int  control() const { return control_; }
    void read_control();

    // Gives it a client, whose socket is closed here. False when the worker is gone (read_control says so, too).
    bool hand_over(int client);

    state is() const { return state_; }
    // After the last one ended: as waitpid() has it.
    int  exit_status() const { return exit_status_; }
    bool was_ready() const { return was_ready_; } // the last one, at any time

  private:
    void end();

    state state_       = state::none;
    int   control_     = -1;
    int   process_     = 0;
    int   exit_status_ = 0;
    bool  was_ready_   = false;
    bool  first_       = true;
};

// ---- in the worker (oa_rpc_worker_socket and oa_rpc_accepted in rpc_hooks.h)
// -----------------------------------------

// This process has allocated something for its client.
void worker_is_used();

} // namespace oa_rpc
