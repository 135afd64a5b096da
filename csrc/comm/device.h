// A rank's device as the phase inside a host needs it: memory that the devices of other ranks reach, and the steps of
// device_sum.h, one after the other on a stream. Two kinds: CUDA GPUs, and the CPU, which the kernels are tested on
// where there is no GPU.
#pragma once

#include "device_sum.h"

#include <memory>
#include <string>

// How another process of this host gets at a rank's memory. What is in it is the kind's own.
struct oa_device_handle {
    char place[64]; // equal for ranks on one device
    char memory[64];
};

class oa_device {
  public:
    virtual ~oa_device() = default; // after all launches have ended, at most their patience later

    // Zeroed memory of this rank, freed with this object; once.
    virtual char * allocate(size_t size, oa_device_handle & handle) = 0;
    // Another rank's, of the same size. Throws when this device cannot reach it.
    virtual char * open(const oa_device_handle & handle, size_t size) = 0;
    // What open() gave is not used any more; before its owner frees it.
    virtual void close() = 0;
    // Zeroed, for the device and the host, freed with this object.
    virtual void * host_memory(size_t size) = 0;

    // `stream`: the kind's own; null for the device's. busy(): not all launches on it have ended. Both throw when the
    // device has failed.
    virtual void launch(const oa_device_call & call, void * stream) = 0;
    virtual bool busy(void * stream)                                = 0;

    // Between device and host memory; returns when it is done. Earlier work on `stream` comes first.
    virtual void copy(void * to, const void * from, size_t size, void * stream) = 0;
};

// `name`: "cpu", or the PCI address of a CUDA device. Throws oa_comm_error saying what is missing.
std::unique_ptr<oa_device> oa_open_device(const std::string & name);

std::unique_ptr<oa_device> oa_open_cpu_device();
std::unique_ptr<oa_device> oa_open_cuda_device(const std::string & pci_address); // where OA_WITH_CUDA is defined
