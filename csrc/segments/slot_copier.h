// Copies experts into their slots, one after the other, on a thread of its own while graphs are computed. Nobody reads
// a slot meanwhile: expert_slots.cpp has the order.
#pragma once

#include "expert_layer.h"
#include "ggml-cpp.h"

#include <atomic>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

struct oa_slot_upload {
    oa_expert_layer * layer;
    size_t            slot;
    int32_t           expert;
    std::string       error = {}; // why it failed; empty if it did not
};

// What tests change of all copiers.
struct oa_slot_seam {
    std::atomic<int>  delay_us{ 0 };      // up to so much before and after each copy
    std::atomic<int>  fails_in{ -1 };     // uploads until one fails; -1: none does
    std::atomic<bool> unordered{ false }; // tables say that an expert is there before it is
    std::atomic<bool> at_random{ false }; // instead of the policy
};
oa_slot_seam & oa_slots_seam();

class oa_slot_copier {
  public:
    oa_slot_copier() = default;
    ~oa_slot_copier();

    oa_slot_copier(const oa_slot_copier &)             = delete;
    oa_slot_copier & operator=(const oa_slot_copier &) = delete;

    void                        queue(const std::vector<oa_slot_upload> & uploads);
    std::vector<oa_slot_upload> take_done(); // since the last call, those that failed, too
    size_t                      n_waiting(); // not done yet

  private:
    void        copy_all();
    std::string copy(const oa_slot_upload & upload);
    char *      stage(ggml_backend_dev_t device, size_t nbytes);

    std::mutex                  mutex_;
    std::condition_variable     changed_;
    std::deque<oa_slot_upload>  waiting_;
    std::vector<oa_slot_upload> done_;
    bool                        copying_ = false, stop_ = false;
    std::thread                 thread_;

    std::map<ggml_backend_dev_t, ggml_backend_buffer_ptr> stages_; // the thread's own; pinned where the device can
};
