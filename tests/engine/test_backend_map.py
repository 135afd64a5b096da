"""The table tensor -> device: exact names, validated against the model, obeyed by loader and scheduler."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from oallama.bench import maps
from oallama.engine import load_settings, native, runtime, skeleton
from oallama.engine.backend_map import backend_map
from oallama.engine.load_settings import Settings
from oallama.errors import OallamaError
from oallama.loading import autoplan

ALICE = Path(runtime.__file__).parents[1] / "bench" / "prompts" / "alice.txt"
Q, NORM = "tensor blk.0.attn_q.weight CPU", "tensor blk.0.attn_norm.weight CPU"


def table_for(path: Path, *, change: Callable[[str], str] = lambda line: line) -> str:
    """Everything on the CPU, each line passed through `change`."""
    lines = maps.backend_map(autoplan.read_graph(path, Settings(n_ctx=64)), "CPU", lambda tensor: "CPU host")
    return "".join(f"{change(line)}\n" for line in lines.splitlines())


def load(path: Path, table: str) -> dict[str, dict[str, int]]:
    return skeleton.dry_run(path, Settings(n_ctx=64, devices=()), table)


@pytest.mark.parametrize("arch", ["llama", "minicpm3"])  # minicpm3 has a tied output
def test_a_complete_table_loads(arch: str, tiny: Callable[..., Path]) -> None:
    path = tiny(arch)
    assert load(path, table_for(path))["CPU"]["weights"] > 0


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (f"{Q} host", "", "no entry for the model's tensor 'blk.0.attn_q.weight'"),
        ("layer 0 CPU", "", "no entry for layer 0"),
        ("layer 0 CPU", "layer 0 CUDA9", "unknown device 'CUDA9'"),
        ("layer 0 CPU", "layer 0 CPU\nlayer 99 CPU", "the model has no layer 99"),
        ("layer 0 CPU", "layer 0 CPU\ntensor blk.0.nothing.weight CPU host", "no tensor 'blk.0.nothing.weight'"),
        ("layer 0 CPU", "layer zero CPU", "line 2: expected 'layer <number> <device>': 'layer zero CPU'"),
        ("layer 0 CPU", "layer 0 CPU\nlayer 0 CPU", "line 3: layer listed twice"),
        (f"{Q} host", f"{Q} maybe", "resident|host|upload"),
        (f"{Q} host", f"{Q} stream", "expected 'stream <tokens>', 1 or more"),
        (f"{Q} host", f"{Q} stream 0", "expected 'stream <tokens>', 1 or more"),
        (f"{Q} host", "slots 1", "expected 'slots <number>', 2 to 64"),
        (f"{Q} host", "caches resident", "expected 'caches stream'"),
        (f"{Q} host", f"{Q} host 32", "resident|host|upload"),
        (f"{Q} host", f"{Q} host packed", "[plain|repacked|tiled|repacked+tiled]"),
        (f"{Q} host", f"{Q} host plain plain", "[plain|repacked|tiled|repacked+tiled]"),
        (f"{Q} host", f"{Q} host tiled+repacked", "[plain|repacked|tiled|repacked+tiled]"),
        (f"{Q} host", f"{Q} upload repacked", "may be uploaded, so it is plain"),
        (f"{Q} host", f"{Q} upload repacked+tiled", "may be uploaded, so it is plain"),
        (f"{Q} host", f"{Q} host repacked+tiled\nsegment blk.0.attn_q.weight CUDA9 rows 8", "has one realisation"),
        (f"{Q} host", f"{Q} resident plain", "a resident weight is tiled, or has no realisation"),
        (f"{NORM} host", f"{NORM} host repacked", "'blk.0.attn_norm.weight' cannot be repacked"),  # no matrix
        ("# oallama backend map v1", "# oallama backend map v9", "line 1: expected '# oallama backend map v1'"),
    ],
)
def test_a_wrong_table_is_refused_naming_the_place(old: str, new: str, message: str, tiny: Callable[..., Path]) -> None:
    path = tiny("llama", "F16")
    table = table_for(path)
    assert table.count(old + "\n") == 1
    with pytest.raises(OallamaError) as error:
        load(path, table.replace(old + "\n", new + "\n" if new else ""))
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    # The refusal leaves nothing behind: the next load is upstream's.
    assert skeleton.dry_run(path, Settings(n_ctx=64, devices=()))


def test_a_realisation_is_obeyed_and_counted(tiny: Callable[..., Path], rpc) -> None:
    """Beside any accelerator; without a word it is llama.cpp's own choice."""
    path = tiny("llama", "Q4_0")
    matrices = {op.weight for op in autoplan.read_graph(path, Settings(n_ctx=64)).targets(1)}
    if not native.core().repacks("CPU", "q4_0", 256, 256, 0):
        pytest.skip("this CPU does not repack q4_0")

    def loaded(realisation: str, devices: tuple[str, ...]) -> dict[str, int]:
        """Bytes of weights by buffer type."""

        def change(line: str) -> str:
            kind, name, *_ = line.split()
            return f"{line} {realisation}".strip() if kind == "tensor" and name in q4 else line

        params = load_settings.make_params(Settings(n_ctx=64, devices=devices))
        with backend_map(table_for(path, change=change)):
            buffers = native.core().memory_dry_run(str(path), *params.addresses)
        return {b["buffer_type"]: b["weights"] for b in buffers if b["weights"]}

    graph = autoplan.read_graph(path, Settings(n_ctx=64))
    q4 = {t.name for t in graph.tensors if t.type == "q4_0" and t.name in matrices}
    nbytes = sum(t.nbytes for t in graph.tensors if t.name in q4)
    for devices in ((), (rpc.devices[0],)):
        repacked, plain = loaded("repacked", devices), loaded("plain", devices)
        assert repacked["CPU_REPACK"] >= nbytes > 0
        assert "CPU_REPACK" not in plain and sum(plain.values()) == sum(repacked.values())
        assert loaded("", devices) == repacked  # neither device has host memory of its own

    settings = Settings(n_ctx=64, devices=(), use_extra_bufts=False)
    name = sorted(q4)[0]
    table = table_for(path).replace(f"tensor {name} CPU host", f"tensor {name} CPU host repacked")
    with pytest.raises(OallamaError, match=f"'{name}' is to be repacked, and this load has no buffer type for that"):
        skeleton.dry_run(path, settings, table)


def test_kv_stays_on_the_device_of_its_layer(tiny: Callable[..., Path], rpc) -> None:
    """Weights of a layer on the CPU, KV cache and attention on the device."""
    path, device = tiny("llama"), rpc.devices[0]
    settings = Settings(n_ctx=256, devices=(device,))
    on_device = table_for(path, change=lambda line: line.replace("CPU", device) if line.startswith("layer") else line)
    memory = skeleton.dry_run(path, settings, on_device)
    assert memory[device]["kv"] > 0 and memory["CPU"]["kv"] == 0
    assert memory[device]["weights"] == 0
    assert memory[device]["compute"] > 0

    ignored = skeleton.dry_run(path, settings, table_for(path))
    assert ignored[device]["kv"] == 0 and ignored["CPU"]["kv"] == memory[device]["kv"]


def test_rope_factors_follow_the_layers_that_read_them(tiny: Callable[..., Path], rpc) -> None:
    """Every layer has a copy; on another device than the layer's it would split the graph at each one."""
    path, device = tiny("minicpm3"), rpc.devices[0]
    settings = Settings(n_ctx=256, devices=(device,))
    graph = autoplan.read_graph(path, settings)
    factors = sum(t.nbytes for t in graph.tensors if t.name.startswith("rope_factors"))
    on_cpu = skeleton.dry_run(path, settings, table_for(path))

    one_layer = table_for(path, change=lambda line: line.replace("layer 0 CPU", f"layer 0 {device}"))
    memory = skeleton.dry_run(path, settings, one_layer)
    assert factors <= memory[device]["weights"] < factors + 1024  # one copy each, padded
    assert memory["CPU"]["weights"] == on_cpu["CPU"]["weights"]  # the other layers still read theirs

    moved = table_for(path).replace("rope_factors_short.weight CPU", f"rope_factors_short.weight {device}")
    assert moved != table_for(path) and skeleton.dry_run(path, settings, moved)[device]["weights"] == 0


PROGRAMS = {
    "llama-bench": ["-p", "8", "-n", "2", "-r", "1", "-ngl", "0"],
    "llama-perplexity": ["-c", "64", "-b", "64", "--chunks", "1", "-fit", "off", "-f", str(ALICE)],
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_llama_cpp_programs_obey_the_table_of_the_environment(
    program: str, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    path, table = tiny("llama"), tmp_path / "table.map"

    def run(text: str) -> subprocess.CompletedProcess[str]:
        table.write_text(text)
        command = [str(runtime.program(program)), "-m", str(path), *PROGRAMS[program]]
        environment = {**os.environ, "OALLAMA_BACKEND_MAP": str(table)}
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)

    good = table_for(path)
    assert run(good).returncode == 0
    # llama-bench keeps llama.cpp's log to itself, and llama-perplexity may end before its log's thread has written.
    for _ in range(50):
        refused = run(good + "tensor blk.0.nothing.weight CPU host\n")
        assert refused.returncode != 0
        if program == "llama-bench" or "the model has no tensor 'blk.0.nothing.weight'" in refused.stderr:
            break
    else:
        pytest.fail(refused.stderr)
