#include "shared_memory_cuda.h"

#include "../region.h"

#include <cerrno>
#include <cstring>
#include <cuda_runtime.h>
#include <string>
#include <sys/mman.h>
#include <unistd.h>

// ggml-cuda is not linked to the driver's library then, which mapped memory needs.
#ifndef GGML_CUDA_NO_VMM
#include <cuda.h>
#endif

namespace oa::weave::cuda {

namespace {

constexpr size_t page = size_t(2) << 20;

size_t whole_pages(size_t nbytes, size_t unit = page) {
    return (nbytes + unit - 1) / unit * unit;
}

void check(cudaError_t code, const char * what) {
    if (code != cudaSuccess) {
        cudaGetLastError(); // not one that others should find
        throw ChannelError(std::string("CUDA cannot ") + what + ": " + cudaGetErrorString(code));
    }
}

// Does not wait for the whole device: another thread may be capturing a graph, which that would spoil.
void clear(char * data, size_t nbytes) {
    check(cudaMemset(data, 0, nbytes), "clear shared memory");
    check(cudaStreamSynchronize(nullptr), "clear shared memory");
}

#ifndef GGML_CUDA_NO_VMM
void check(CUresult code, const char * what) {
    if (code != CUDA_SUCCESS) {
        const char * why = nullptr;
        cuGetErrorString(code, &why);
        throw ChannelError(std::string("CUDA cannot ") + what + ": " + (why ? why : "unknown error"));
    }
}

class MappedMemory : public SharedMemory {
  public:
    explicit MappedMemory(size_t nbytes) {
        const CUmemAllocationProp wanted = properties();
        size_t                    unit   = page;
        check(cuMemGetAllocationGranularity(&unit, &wanted, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED), "map memory");
        handle_.way    = Way::mapped;
        handle_.nbytes = whole_pages(nbytes, unit > page ? unit : page);
        check(cuMemCreate(&allocation_, handle_.nbytes, &wanted, 0), "allocate memory to share");
        created_ = true;
        guard([&] {
            check(cuMemExportToShareableHandle(&file_, allocation_, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
                  "share memory by a file descriptor");
            map();
            clear(data_, handle_.nbytes);
        });
    }

    MappedMemory(const MemoryHandle & handle, int file) {
        handle_ = handle;
        properties(); // the context is there
        check(cuMemImportFromShareableHandle(&allocation_, reinterpret_cast<void *>(intptr_t(file)),
                                             CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
              "open shared memory");
        created_ = true;
        guard([&] { map(); });
    }

    ~MappedMemory() override { release(); }

  private:
    static CUmemAllocationProp properties() {
        int device = 0;
        check(cudaGetDevice(&device), "tell the current device");
        check(cudaFree(nullptr), "begin"); // makes the context that the driver's calls need
        CUmemAllocationProp made  = {};
        made.type                 = CU_MEM_ALLOCATION_TYPE_PINNED;
        made.location.type        = CU_MEM_LOCATION_TYPE_DEVICE;
        made.location.id          = device;
        made.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
        return made;
    }

    void map() {
        CUdeviceptr at = 0;
        check(cuMemAddressReserve(&at, handle_.nbytes, 0, 0, 0), "reserve addresses");
        data_ = reinterpret_cast<char *>(at);
        check(cuMemMap(at, handle_.nbytes, 0, allocation_, 0), "map memory");
        mapped_                = true;
        CUmemAccessDesc access = {};
        access.location        = properties().location;
        access.flags           = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        check(cuMemSetAccess(at, handle_.nbytes, &access, 1), "reach shared memory from this device");
    }

    template <class Action> void guard(Action && action) {
        try {
            action();
        } catch (...) {
            release();
            throw;
        }
    }

    void release() {
        const auto at = reinterpret_cast<CUdeviceptr>(data_);
        if (mapped_) {
            cuMemUnmap(at, handle_.nbytes);
        }
        if (data_) {
            cuMemAddressFree(at, handle_.nbytes);
        }
        if (created_) {
            cuMemRelease(allocation_);
        }
        if (file_ >= 0) {
            close(file_);
        }
        created_ = mapped_ = false;
        data_              = nullptr;
        file_              = -1;
    }

    CUmemGenericAllocationHandle allocation_ = 0;
    bool                         created_ = false, mapped_ = false;
};
#endif

class IpcMemory : public SharedMemory {
  public:
    explicit IpcMemory(size_t nbytes) : own_(true) {
        handle_.way    = Way::ipc;
        handle_.nbytes = whole_pages(nbytes);
        check(cudaMalloc(reinterpret_cast<void **>(&data_), handle_.nbytes), "allocate memory to share");
        cudaIpcMemHandle_t ipc;
        static_assert(sizeof(ipc) <= sizeof(handle_.ipc), "a handle is larger than its place");
        try {
            check(cudaIpcGetMemHandle(&ipc, data_), "share memory by a handle");
            clear(data_, handle_.nbytes);
        } catch (...) {
            cudaFree(data_);
            throw;
        }
        memcpy(handle_.ipc, &ipc, sizeof(ipc));
    }

    explicit IpcMemory(const MemoryHandle & handle) : own_(false) {
        handle_ = handle;
        cudaIpcMemHandle_t ipc;
        memcpy(&ipc, handle.ipc, sizeof(ipc));
        check(cudaIpcOpenMemHandle(reinterpret_cast<void **>(&data_), ipc, cudaIpcMemLazyEnablePeerAccess),
              "open shared memory");
    }

    ~IpcMemory() override {
        if (own_) {
            cudaFree(data_);
        } else {
            cudaIpcCloseMemHandle(data_);
        }
    }

  private:
    const bool own_;
};

class HostMemory : public SharedMemory {
  public:
    explicit HostMemory(size_t nbytes) {
        handle_.way    = Way::host;
        handle_.nbytes = whole_pages(nbytes);
        file_          = memfd_create("oallama-weave", MFD_CLOEXEC);
        if (file_ < 0 || ftruncate(file_, off_t(handle_.nbytes)) != 0) {
            const std::string why = strerror(errno);
            release();
            throw ChannelError("cannot share the host's memory: " + why);
        }
        map(file_);
    }

    HostMemory(const MemoryHandle & handle, int file) {
        handle_ = handle;
        map(file);
    }

    ~HostMemory() override { release(); }

  private:
    void map(int file) {
        void * host = mmap(nullptr, handle_.nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        host_       = host == MAP_FAILED ? nullptr : host;
        try {
            if (!host_) {
                throw ChannelError(std::string("cannot map shared memory: ") + strerror(errno));
            }
            check(cudaHostRegister(host_, handle_.nbytes, cudaHostRegisterMapped | cudaHostRegisterPortable),
                  "pin shared memory");
            pinned_ = true;
            check(cudaHostGetDevicePointer(reinterpret_cast<void **>(&data_), host_, 0), "address pinned memory");
        } catch (...) {
            release();
            throw;
        }
    }

    void release() {
        if (pinned_) {
            cudaHostUnregister(host_);
        }
        if (host_) {
            munmap(host_, handle_.nbytes);
        }
        if (file_ >= 0) {
            close(file_);
        }
        pinned_ = false;
        host_   = nullptr;
        file_   = -1;
    }

    void * host_   = nullptr;
    bool   pinned_ = false;
};

} // namespace

const char * name_of(Way way) {
    switch (way) {
        case Way::mapped: return "mapped memory";
        case Way::ipc: return "CUDA IPC";
        case Way::host: return "pinned memory of the host";
    }
    return "unknown";
}

std::unique_ptr<SharedMemory> SharedMemory::make(Way way, size_t nbytes) {
    switch (way) {
#ifndef GGML_CUDA_NO_VMM
        case Way::mapped: return std::make_unique<MappedMemory>(nbytes);
#else
        case Way::mapped: break;
#endif
        case Way::ipc: return std::make_unique<IpcMemory>(nbytes);
        case Way::host: return std::make_unique<HostMemory>(nbytes);
    }
    throw ChannelError("no memory of this kind here");
}

std::unique_ptr<SharedMemory> SharedMemory::open(const MemoryHandle & handle, int file) {
    switch (handle.way) {
#ifndef GGML_CUDA_NO_VMM
        case Way::mapped: return std::make_unique<MappedMemory>(handle, file);
#else
        case Way::mapped: break;
#endif
        case Way::ipc: return std::make_unique<IpcMemory>(handle);
        case Way::host: return std::make_unique<HostMemory>(handle, file);
    }
    throw ChannelError("no memory of this kind here");
}

} // namespace oa::weave::cuda
