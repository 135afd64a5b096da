"""Divided weights: one weight in two segments, computed by an accelerator and the host at the same time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oallama.bench.maps import backend_map
from oallama.data.operators import TensorInfo
from oallama.engine import skeleton
from oallama.engine.load_settings import Settings
from oallama.engine.rpc import LocalRpcServer
from oallama.errors import OallamaError
from oallama.loading import autoplan
from support.logits import AMX, ARCHITECTURES, TOKENS, compute_logits, greedy_differences, nmse
from support.vulkan import VULKAN, has_vulkan

BLOCK = {"Q8_0": 32, "Q4_0": 32, "F16": 1}


def table(path: Path, device: str, counts: Mapping[str, int], cpu: Callable[[str], bool], mode: str = "host") -> str:
    """Feed-forwards (and, where `counts` names it, the output matrix) on the host with `counts` of them on `device`.

    counts: values on the device by kind of weight ("ffn": the block's inner width). cpu: of the other weights and
    layers, by name ("layer 3"), what stays on the host.
    """
    graph = autoplan.read_graph(path, Settings(n_ctx=64))
    targets = {op.weight for op in graph.targets(1)}

    def place(t: TensorInfo) -> str | tuple[str, str]:
        kind = next((k for k in counts if (k == "ffn" and is_ffn(t.name)) or t.name == f"{k}.weight"), None)
        if t.name in targets and kind:
            return f"CPU {mode}", f"{device} {'columns' if 'ffn_down' in t.name else 'rows'} {counts[kind]}"
        return "CPU host" if cpu(t.name) else f"{device} resident"

    return backend_map(graph, lambda il: "CPU" if cpu(f"layer {il}") else device, place)


def is_ffn(name: str) -> bool:
    return any(f".ffn_{part}{kind}.weight" in name for part in ("up", "gate", "down") for kind in ("", "_exps"))


def width(path: Path) -> int:
    graph = autoplan.read_graph(path, Settings(n_ctx=64))
    return next(t.ne[0] for t in graph.tensors if ".ffn_down" in t.name)


def jobs(path: Path, device: str, folder: Path, block: int, **job: Any) -> list[dict[str, Any]]:
    """Small, half and large parts on the device; attention beside it, on the host, or mixed; the output matrix too."""
    n, tied = width(path), "minicpm3" in path.name
    parts = [block, n // 2 // block * block, n - block]
    sides: list[Callable[[str], bool]] = [
        lambda name: False,
        lambda name: True,
        lambda name: sum(name.encode()) % 2 == 0,
    ]
    result = []
    for i, (count, cpu) in enumerate(zip(parts, sides, strict=True)):
        counts = {"ffn": count} if tied else {"ffn": count, "output": 100 + i}
        for mode in ("host", "upload"):
            file = folder / f"{path.stem}-{i}-{mode}.map"
            file.write_text(table(path, device, counts, cpu, mode))
            result.append({"model": str(path), "table": str(file), "devices": [device], **job})
    return result


@pytest.mark.parametrize("arch", [*ARCHITECTURES, "gpt-oss"])  # the last with biases of experts
@pytest.mark.parametrize("layout", ["plain", "repacked", "amx"])
def test_two_cpus_compute_what_one_does(
    arch: str, layout: str, tiny: Callable[..., Path], lib: Path, tmp_path: Path
) -> None:
    """Repacked for the host (for AMX, too): kernels that round differently from the RPC server's."""
    if layout == "amx" and "amx_int8" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this CPU has no AMX")
    path = tiny(arch, "Q4_0")
    common = {"use_extra_bufts": layout != "plain", "n_ubatch": 64, "flash_attn": 1}
    with LocalRpcServer(threads=1, register=False) as server:
        wanted = [{"model": str(path), "n_gpu_layers": 0, **common}]
        wanted += jobs(path, "RPC0", tmp_path, BLOCK["Q4_0"], rpc=[server.endpoint], **common)
        whole, *divided = compute_logits(lib, wanted, tmp_path, AMX if layout == "amx" else None)
    for job, found in zip(wanted[1:], divided, strict=True):
        assert nmse(found, whole) <= (1e-6 if layout == "plain" else 1e-3), job["table"]
    assert not all(np.array_equal(found, whole) for found in divided), "identical to the bit: was anything divided?"


@pytest.mark.slow
@pytest.mark.skipif(not has_vulkan(), reason="needs Vulkan with lavapipe")
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_vulkan_and_the_host(arch: str, tiny: Callable[..., Path], lib: Path, tmp_path: Path) -> None:
    path = tiny(arch, "Q8_0")
    # Upstream's Vulkan MUL_MAT_ID for more than a few tokens corrupts the heap on lavapipe (Mesa 22.3).
    common = {"tokens": TOKENS[:40], "n_ubatch": 4 if arch == "qwen3moe" else 64, "flash_attn": 1}
    wanted = [{"model": str(path), "n_gpu_layers": 0, **common}]
    wanted += jobs(path, "Vulkan0", tmp_path, BLOCK["Q8_0"], **common)
    whole, *divided = compute_logits(lib, wanted, tmp_path, VULKAN)
    for job, found in zip(wanted[1:], divided, strict=True):
        assert nmse(found, whole) <= 1e-3, job["table"]
        assert greedy_differences(found, whole) == 0, job["table"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("segment blk.0.ffn_up.weight {device} rows 0", "rows|columns <number>', 1 or more"),
        ("segment blk.0.ffn_up.weight {device} planes 8", "rows|columns <number>', 1 or more"),
        ("segment blk.0.ffn_up.weight {device} rows 99999", "its first 99999 cannot be a segment"),
        ("segment blk.0.ffn_down.weight {device} columns 33", "columns in blocks of 32; its first 33"),
        ("segment blk.0.ffn_up.weight CPU rows 8", "is to live on 'CPU', where the weight lives"),
        ("segment blk.0.attn_q.weight {device} rows 8", "which does not live on the CPU"),
        ("segment blk.0.nothing.weight {device} rows 8", "which has no line 'tensor'"),
        ("segment blk.0.ffn_up.weight CUDA9 rows 8", "unknown device 'CUDA9'"),
    ],
)
def test_a_wrong_segment_is_refused(line: str, message: str, tiny: Callable[..., Path], rpc: Any) -> None:
    path, device = tiny("llama"), rpc.devices[0]
    text = table(path, device, {}, is_ffn)
    settings = Settings(n_ctx=64, devices=(device,))
    assert skeleton.dry_run(path, settings, text)
    with pytest.raises(OallamaError) as error:
        skeleton.dry_run(path, settings, text + line.format(device=device) + "\n")
    assert message in str(error.value)


def test_a_dry_run_counts_the_device_part(tiny: Callable[..., Path], rpc: Any) -> None:
    path, device = tiny("llama", "F16"), rpc.devices[0]
    settings = Settings(n_ctx=64, devices=(device,))
    host = skeleton.dry_run(path, settings, table(path, device, {}, is_ffn))
    divided = skeleton.dry_run(path, settings, table(path, device, {"ffn": width(path) // 2}, is_ffn))
    ffn = sum(t.nbytes for t in autoplan.read_graph(path, Settings(n_ctx=64)).tensors if is_ffn(t.name))
    assert divided[device]["weights"] - host[device]["weights"] == pytest.approx(ffn / 2, rel=0.01)
    assert divided["CPU"]["weights"] >= host["CPU"]["weights"]
