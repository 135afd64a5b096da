"""Devices of ggml that share one CUDA device (GGML_CUDA_DEVICES): whose number is whose. Needs no CUDA."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from support.paths import NATIVE, ROOT
from support.processes import ran

RUNTIME = """
#pragma once
enum cudaError_t { cudaSuccess, cudaErrorInvalidDevice };
typedef struct CUstream_st * cudaStream_t;
typedef struct CUevent_st * cudaEvent_t;
inline cudaError_t cudaGetDeviceCount(int * n) { *n = 1; return cudaSuccess; }
inline cudaError_t cudaGetDevice(int * device) { *device = 0; return cudaSuccess; }
inline cudaError_t cudaSetDevice(int device) { return device == 0 ? cudaSuccess : cudaErrorInvalidDevice; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline const char * cudaGetErrorString(cudaError_t) { return "invalid device"; }
inline cudaError_t cudaEventCreate(cudaEvent_t * event) { *event = nullptr; return cudaSuccess; }
inline cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }
inline cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }
inline cudaError_t cudaEventElapsedTime(float * ms, cudaEvent_t, cudaEvent_t) { *ms = 1.0f; return cudaSuccess; }
"""


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
def test_virtual_devices_are_told_apart_and_found(tmp_path: Path) -> None:
    (tmp_path / "cuda_runtime.h").write_text(RUNTIME)
    csrc, ggml = ROOT / "csrc", ROOT / "third_party" / "llama.cpp" / "patched" / "ggml"
    folders = (tmp_path, csrc / "base", csrc / "observe", csrc / "weave", csrc / "weave" / "cuda", ggml / "include")
    sources = (NATIVE / "virtual_devices.cpp", csrc / "observe" / "op_timer_cuda.cpp")
    program = tmp_path / "devices"
    ran("c++", "-std=c++17", *(f"-I{folder}" for folder in folders), *sources, "-o", program)
    assert ran(program).stdout.split() == ["CUDA1"]
