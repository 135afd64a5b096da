"""Compute buffers of real graphs: bytes alive at the peak, by ggml's allocator, and by an offline layout.

python bench/compute_buffers.py [--out FILE.jsonl] [--device Vulkan0] [--models llama3-8b,..]

Published shapes in sparse files (no weight is stored) under llama.cpp's own placements, nothing is allocated. One JSON
line per model, placement, form of attention, micro-batch, rows with logits and sequences; arenas in it are one device's
compute buffer of one graph: the whole micro-batch, then one decode step.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

os.environ.setdefault("GGML_VK_VISIBLE_DEVICES", "0")  # lavapipe is hidden otherwise

from oallama.bench.machine import describe
from oallama.bench.script import arguments, record, words
from oallama.engine import skeleton
from oallama.engine.load_settings import Settings
from oallama.engine.rpc import LocalRpcServer
from oallama.modelmaker import make_sparse_model
from oallama.planning.arenas import Arena, graphs_of

MODELS = ("llama3-8b", "qwq-32b", "minicpm3-4b", "qwen3-30b-a3b", "qwen3-235b-a22b")
UBATCHES = (128, 512, 2048)
N_CTX = 8192
FFN = r"\.ffn_.*"


def placements(device: str, n_layer: int) -> dict[str, dict[str, Any]]:
    """llama.cpp's ways to place a model on one device."""
    everything: dict[str, Any] = {"devices": (device,), "n_gpu_layers": n_layer + 1}
    half = {"devices": (device,), "n_gpu_layers": n_layer // 2}
    return {
        "cpu": {"devices": ()},
        "all": everything,
        "half": {**half, "op_offload": False},
        "half, uploads": half,
        "ffn on the CPU": {**everything, "override_tensor": ((FFN, "CPU"),), "op_offload": False},
    }


def cells(shape: str, path: Path, device: str) -> Iterator[dict[str, Any]]:
    """The grid of one model, arenas as dicts without their blocks."""
    n_layer = skeleton.read_graphs(path, Settings(n_ctx=64), [1])["n_layer"]
    places = placements(device, n_layer)
    for (name, place), flash, n_ubatch, logits in product(places.items(), ("on", "off"), UBATCHES, ("last", "all")):
        n_outputs = 1 if logits == "last" else 0
        settings = Settings(n_ctx=N_CTX, n_ubatch=n_ubatch, flash_attn=flash, n_outputs_max=n_outputs, **place)
        arenas = [Arena.from_engine(raw) for raw in skeleton.read_arenas(path, settings, graphs_of(settings))]
        yield {
            "shape": shape, "placement": name, "device": device, "flash_attn": flash, "n_ctx": N_CTX,
            "n_ubatch": n_ubatch, "logits": logits,
            "arenas": [
                {"graph": "decode" if a.n_tokens == 1 else "prefill", "device": a.device, "bound": a.bound,
                 "online": a.online, "offline": a.offline, "blocks": len(a.blocks)}
                for a in arenas
            ],
        }  # fmt: skip


def main() -> None:
    parser = arguments(__doc__, "compute-buffers")
    parser.add_argument("--device", help="default: an RPC server of this machine")
    parser.add_argument("--models", type=words, default=MODELS)
    options = parser.parse_args()
    record(measured(options), options.out, each={"machine": describe()}, quiet=True)


def measured(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    device = options.device or LocalRpcServer().devices[0]
    for shape in options.models:
        with tempfile.TemporaryDirectory() as folder:
            path = make_sparse_model(Path(folder) / f"{shape}.gguf", shape=shape, file_type="Q4_K_M")
            for line in cells(shape, path, device):
                worst = max(line["arenas"], key=lambda a: a["online"] / max(a["bound"], 1))
                print(
                    f"{shape} {line['placement']}, FA {line['flash_attn']}, ub {line['n_ubatch']}, {line['logits']}: "
                    f"at worst {worst['graph']} on {worst['device']}: {worst['bound'] / 2**20:.2f} MiB needed, "
                    f"{worst['online'] / 2**20:.2f} by ggml, {worst['offline'] / 2**20:.2f} offline",
                    flush=True,
                )
                yield line


if __name__ == "__main__":
    main()
