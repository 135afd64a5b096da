#include "device_cpu.h"

#include "comm_error.h"
#include "device.h"
#include "shared_memory.h"

#include <cstring>
#include <deque>
#include <random>
#include <unistd.h>
#include <vector>

namespace {

struct memory_handle {
    int32_t  pid, descriptor;
    uint64_t token;
};

template <typename Values> void run_blocks(const oa_device_call & call) {
    const int n_blocks = oa_device_blocks(call);
    for (int i = 0; i < n_blocks; ++i) {
        oa_cpu_block block(i, n_blocks);
        oa_device_block<Values, oa_cpu_block>(block, call).run();
    }
}

class cpu_device : public oa_device {
  public:
    char * allocate(size_t size, oa_device_handle & handle) override {
        std::random_device random;
        memory_handle      mine = {};
        mine.pid                = getpid();
        mine.token              = uint64_t(random()) << 32 | random();
        segments_.emplace_back().create(size, mine.token);
        mine.descriptor = segments_.back().descriptor();
        std::strcpy(handle.place, "cpu");
        std::memcpy(handle.memory, &mine, sizeof(mine));
        return segments_.back().data();
    }

    char * open(const oa_device_handle & handle, size_t size) override {
        if (std::strcmp(handle.place, "cpu") != 0) {
            throw oa_comm_error(std::string("the CPU cannot reach the memory of device ") + handle.place);
        }
        memory_handle theirs;
        std::memcpy(&theirs, handle.memory, sizeof(theirs));
        segments_.emplace_back().attach(theirs.pid, theirs.descriptor, size, theirs.token);
        segments_.back().close_descriptor();
        return segments_.back().data();
    }

    void close() override {} // memory of the CPU lives until the last process has let go of it

    void * host_memory(size_t size) override { return host_.emplace_back((size + 15) / 16).data(); }

    void launch(const oa_device_call & call, void *) override {
        switch (call.dtype) {
            case OA_F32: run_blocks<oa_f32_values>(call); return;
            case OA_F16: run_blocks<oa_f16_values>(call); return;
            case OA_BF16: run_blocks<oa_bf16_values>(call); return;
        }
    }

    bool busy(void *) override { return false; }

    void copy(void * to, const void * from, size_t size, void *) override { std::memcpy(to, from, size); }

  private:
    struct alignas(16) unit {
        char bytes[16];
    };

    std::deque<oa_shared_memory>  segments_;
    std::deque<std::vector<unit>> host_;
};

} // namespace

std::unique_ptr<oa_device> oa_open_cpu_device() {
    return std::make_unique<cpu_device>();
}

std::unique_ptr<oa_device> oa_open_device(const std::string & name) {
    if (name.empty()) {
        throw oa_comm_error("its values are in host memory");
    }
    if (name == "cpu") {
        return oa_open_cpu_device();
    }
#ifdef OA_WITH_CUDA
    return oa_open_cuda_device(name);
#else
    throw oa_comm_error("oallama was built without CUDA");
#endif
}
