// CUDA GPUs: memory of other processes through CUDA IPC, of other GPUs if these are peers.
#include "comm_error.h"
#include "device.h"
#include "device_sum_cuda.h"

#include <cstring>
#include <vector>

namespace {

void check(cudaError_t code, const std::string & what) {
    if (code != cudaSuccess) {
        throw oa_comm_error("CUDA cannot " + what + ": " + cudaGetErrorString(code));
    }
}

// While CUDA calls of this thread are ours.
class on_device {
  public:
    explicit on_device(int device) {
        check(cudaGetDevice(&before_), "tell the current device");
        check(cudaSetDevice(device), "use device " + std::to_string(device));
    }
    ~on_device() { cudaSetDevice(before_); }

    on_device(const on_device &)             = delete;
    on_device & operator=(const on_device &) = delete;

  private:
    int before_ = 0;
};

class cuda_device : public oa_device {
  public:
    explicit cuda_device(const std::string & pci_address) : place_(pci_address) {
        check(cudaDeviceGetByPCIBusId(&device_, pci_address.c_str()), "find device " + pci_address);
        const on_device here(device_);
        check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "make a stream");
    }

    ~cuda_device() override {
        int before = 0;
        cudaGetDevice(&before);
        cudaSetDevice(device_);
        close();
        cudaFree(own_);
        for (void * host : host_) {
            cudaFreeHost(host);
        }
        cudaStreamDestroy(stream_);
        cudaSetDevice(before);
    }

    char * allocate(size_t size, oa_device_handle & handle) override {
        // An allocation of its own: what CUDA exports is the whole 2 MiB page that memory lies in.
        constexpr size_t page = 2 << 20;
        const on_device  here(device_);
        check(cudaMalloc(reinterpret_cast<void **>(&own_), (size + page - 1) / page * page),
              "allocate " + std::to_string(size) + " bytes for sums");
        check(cudaMemset(own_, 0, size), "clear memory");
        check(cudaDeviceSynchronize(), "clear memory");
        cudaIpcMemHandle_t ipc;
        check(cudaIpcGetMemHandle(&ipc, own_), "share memory with other processes");
        static_assert(sizeof(ipc) <= sizeof(handle.memory), "a handle is larger than its place");
        std::memcpy(handle.memory, &ipc, sizeof(ipc));
        std::strncpy(handle.place, place_.c_str(), sizeof(handle.place) - 1);
        return own_;
    }

    char * open(const oa_device_handle & handle, size_t) override {
        const on_device here(device_);
        require_peer(handle.place);
        cudaIpcMemHandle_t ipc;
        std::memcpy(&ipc, handle.memory, sizeof(ipc));
        void * theirs = nullptr;
        check(cudaIpcOpenMemHandle(&theirs, ipc, cudaIpcMemLazyEnablePeerAccess),
              std::string("open the memory of a rank on device ") + handle.place);
        opened_.push_back(theirs);
        return static_cast<char *>(theirs);
    }

    void close() override {
        const on_device here(device_);
        cudaDeviceSynchronize(); // a kernel may still read there, and write to the report
        for (void * theirs : opened_) {
            cudaIpcCloseMemHandle(theirs);
        }
        opened_.clear();
    }

    void * host_memory(size_t size) override {
        const on_device here(device_);
        void *          memory = nullptr;
        check(cudaHostAlloc(&memory, size, cudaHostAllocMapped | cudaHostAllocPortable),
              "allocate " + std::to_string(size) + " bytes of pinned memory");
        host_.push_back(memory);
        std::memset(memory, 0, size);
        return memory;
    }

    void launch(const oa_device_call & call, void * stream) override {
        const on_device here(device_);
        check(oa_device_sum_cuda(call, of(stream)), "start a sum");
    }

    bool busy(void * stream) override {
        const on_device   here(device_);
        const cudaError_t code = cudaStreamQuery(of(stream));
        if (code == cudaErrorNotReady) {
            cudaGetLastError(); // not one that others should find
            return true;
        }
        check(code, "finish a sum");
        return false;
    }

    void copy(void * to, const void * from, size_t size, void * stream) override {
        const on_device here(device_);
        check(cudaMemcpyAsync(to, from, size, cudaMemcpyDefault, of(stream)), "copy values");
        check(cudaStreamSynchronize(of(stream)), "copy values");
    }

  private:
    cudaStream_t of(void * stream) const { return stream ? static_cast<cudaStream_t>(stream) : stream_; }

    void require_peer(const std::string & place) const {
        if (place == place_) {
            return;
        }
        int theirs = 0, can = 0;
        check(cudaDeviceGetByPCIBusId(&theirs, place.c_str()),
              "see device " + place + " of another rank (CUDA_VISIBLE_DEVICES must name it)");
        check(cudaDeviceCanAccessPeer(&can, device_, theirs), "ask about peers");
        if (!can) {
            throw oa_comm_error("device " + place_ + " cannot address the memory of device " + place +
                                " (no peer access)");
        }
    }

    const std::string   place_;
    int                 device_ = 0;
    cudaStream_t        stream_ = nullptr;
    char *              own_    = nullptr;
    std::vector<void *> opened_, host_;
};

} // namespace

std::unique_ptr<oa_device> oa_open_cuda_device(const std::string & pci_address) {
    return std::make_unique<cuda_device>(pci_address);
}
