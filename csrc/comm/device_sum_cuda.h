// A step of device_sum.h as a CUDA kernel.
#pragma once

#include "device_sum.h"

#include <cuda_runtime.h>

cudaError_t oa_device_sum_cuda(const oa_device_call & call, cudaStream_t stream);
