// Memory of a GPU that another process of this host, with the same or another GPU, can address.
//
// Always an allocation of its own in pages of 2 MiB: what CUDA shares is the whole page that memory lies in. Three
// ways, in this order; that the driver agrees to one does not mean that stores arrive (docs/weave-cuda.md), so who
// attaches tries with a task there and back, and takes the next way if need be.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace oa::weave::cuda {

enum class Way : uint32_t {
    mapped, // cuMemCreate: a file descriptor; memory lives until the last process has let go of it
    ipc,    // cudaIpcGetMemHandle: the owner must not free it before the others have closed it
    host,   // a memfd of the host's memory, which both GPUs address over PCIe
};

constexpr Way all_ways[] = { Way::mapped, Way::ipc, Way::host };

const char * name_of(Way way);

// What another process opens it by, together with the file descriptor, which goes through a Unix socket.
struct MemoryHandle {
    Way           way;
    uint32_t      unused;
    uint64_t      nbytes;
    unsigned char ipc[64];
};

class SharedMemory {
  public:
    // On the current device. Zeroed. Throws ChannelError: this way is not possible here.
    static std::unique_ptr<SharedMemory> make(Way way, size_t nbytes);
    // Another process's. `file` stays the caller's; -1 where there is none.
    static std::unique_ptr<SharedMemory> open(const MemoryHandle & handle, int file);

    // No launch may use it any more; of Way::ipc the other side has closed it before its owner does.
    virtual ~SharedMemory() = default;

    char *               data() const { return data_; } // for the device
    const MemoryHandle & handle() const { return handle_; }
    int                  file() const { return file_; } // to pass on; or -1

  protected:
    char *       data_   = nullptr;
    MemoryHandle handle_ = {};
    int          file_   = -1;
};

} // namespace oa::weave::cuda
