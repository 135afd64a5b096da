"""Measures the memory a plan wins back from the compute buffers: logits nobody reads, and smaller micro-batches.

python bench/won_back.py [--out FILE.jsonl]

"before" is llama.cpp's own context (n_outputs_max = 0: logits for every row of a micro-batch), "after" is a plan's
context for generation (one row). Both by dry run and really allocated, with everything on a loopback RPC server, for a
small model with a vocabulary of 128 thousand; QwQ-32B's shapes, in a sparse file without weights, by dry run only.
Writes the machine, then one JSON line per model, micro-batch and device; prints them as a table.
"""

from __future__ import annotations

import ctypes
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from oallama.bench.machine import describe
from oallama.bench.script import arguments, record
from oallama.engine import load_settings, native, runtime, skeleton
from oallama.engine.load_settings import Settings
from oallama.engine.rpc import LocalRpcServer
from oallama.modelmaker import make_model, make_sparse_model

N_UBATCH = (512, 256, 128)
N_OUTPUTS_MAX = {"before": 0, "after": 1}
N_VOCAB = 128256  # LLaMA 3's
N_CTX = 4096


def contexts(device: str) -> Iterator[tuple[int, str, Settings]]:
    """(micro-batch, "before" or "after", settings): the requested micro-batch as it is and smaller ones, in pairs."""
    for n_ubatch in N_UBATCH:
        for when, n_outputs_max in N_OUTPUTS_MAX.items():
            settings = Settings(n_ctx=N_CTX, n_ubatch=n_ubatch, devices=(device,), n_threads=2)
            yield n_ubatch, when, replace(settings, n_outputs_max=n_outputs_max)


def dry_runs(name: str, path: Path, device: str) -> list[dict[str, Any]]:
    """Compute-buffer bytes by device, before and after, from the allocators' dry run."""
    found = {(n, when): skeleton.dry_run(path, settings) for n, when, settings in contexts(device)}
    return _lines(name, "dry run", found)


def loads(name: str, path: Path, device: str) -> list[dict[str, Any]]:
    """The same of live contexts that decoded a full micro-batch; on the accelerator it is what the ledger counts."""
    llama_cpp, core = runtime.llama_cpp(), native.core()
    model = None
    found = {}
    for n_ubatch, when, settings in contexts(device):
        params = load_settings.make_params(settings)
        model = model or llama_cpp.llama_model_load_from_file(str(path).encode(), params.model)
        before = _allocated(device)
        context = llama_cpp.llama_init_from_model(model, params.context)
        tokens = (llama_cpp.llama_token * n_ubatch)(*range(300, 300 + n_ubatch))
        if llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(tokens, n_ubatch)):
            raise RuntimeError(f"llama_decode fails with n_ubatch {n_ubatch} and {when}")
        live = skeleton.by_device(core.memory_of(ctypes.cast(context, ctypes.c_void_p).value))
        live[device]["compute"] = _allocated(device) - before - live[device]["kv"]
        found[n_ubatch, when] = live
        llama_cpp.llama_free(context)
    llama_cpp.llama_model_free(model)
    return _lines(name, "loaded", found)


def _allocated(device: str) -> int:
    return sum(e["current"] for name, e in native.core().ledger().items() if name.split("[")[0] == device)


def _lines(name: str, how: str, found: dict[tuple[int, str], dict[str, dict[str, int]]]) -> list[dict[str, Any]]:
    first = found[N_UBATCH[0], "before"]
    return [
        {
            "model": name, "how": how, "device": device, "n_ubatch": n_ubatch,
            "before": found[n_ubatch, "before"][device]["compute"],
            "after": found[n_ubatch, "after"][device]["compute"],
            # Against llama.cpp's defaults: the largest micro-batch with all logits.
            "won_back": first[device]["compute"] - found[n_ubatch, "after"][device]["compute"],
        }
        for n_ubatch in N_UBATCH
        for device in first
    ]  # fmt: skip


def main() -> None:
    options = arguments(__doc__, "won-back").parse_args()
    runtime.llama_cpp()._logger.set_verbose(False)
    with tempfile.TemporaryDirectory() as name, LocalRpcServer() as server:
        folder, device = Path(name), server.devices[0]
        small = make_model(folder / "small.gguf", shape="small", file_type="Q8_0", overrides={"n_vocab": N_VOCAB})
        large = make_sparse_model(folder / "32b.gguf", shape="qwq-32b", file_type="Q4_K_M")
        text = f"llama small, {N_VOCAB} tokens"
        lines = [*dry_runs(text, small, device), *loads(text, small, device), *dry_runs("qwq-32b", large, device)]
    record(lines, options.out, head={"machine": describe()}, quiet=True)
    print(f"compute buffers, MiB; n_ctx {N_CTX}\n{'model':28} {'':8} {'device':6} {'n_ubatch':>8}", end="")
    print(f" {'all rows':>9} {'one row':>9} {'won back':>9}")
    for line in lines:
        before, after, won = (line[key] / 2**20 for key in ("before", "after", "won_back"))
        print(f"{line['model']:28} {line['how']:8} {line['device']:6} {line['n_ubatch']:8}", end="")
        print(f" {before:9.2f} {after:9.2f} {won:9.2f}")


if __name__ == "__main__":
    main()
