"""llama.cpp's own --fit and its placement flags: the homes we compute are where its loader puts the bytes."""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from oallama.data.plan import HOST
from oallama.engine import load_settings, runtime, skeleton, stock_fit
from oallama.engine.load_settings import Settings
from oallama.engine.rpc import LocalRpcServer
from oallama.engine.stock_fit import FitResult
from oallama.errors import OallamaError
from oallama.loading import autoplan
from oallama.modelmaker import make_model
from oallama.planning import OperatorGraph
from oallama.planning.stock import StockFlags, cpu_ffn, cpu_moe, stock_homes
from support.logits import ARCHITECTURES
from support.paths import ROOT
from support.synthetic import Shape, raw_graph

SETTINGS = Settings(n_ctx=256, n_batch=64, n_ubatch=64)
EVERYTHING = 1 << 50


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of experts with eight layers."""
    return make_model(
        tmp_path_factory.mktemp("moe") / "moe.gguf", arch="qwen3moe", file_type="Q8_0", overrides={"n_layer": 8}
    )


def on(*devices: str) -> Settings:
    return replace(SETTINGS, devices=devices)


def load_flags(path: Path, flags: StockFlags, devices: Sequence[str]) -> dict[str, dict[str, int]]:
    """What llama.cpp allocates per device when it is given these flags and no backend map."""
    settings = on(*devices)
    return skeleton.dry_run(
        path,
        replace(
            settings, n_gpu_layers=flags.n_gpu_layers, tensor_split=flags.tensor_split, override_tensor=flags.overrides
        ),
    )


def check_homes(path: Path, graph: OperatorGraph, flags: StockFlags, devices: Sequence[str]) -> None:
    """Weights and KV cache of every device, computed from `homes`, equal llama.cpp's to the byte."""
    found, layers = stock_homes(graph, flags, [*devices, HOST])
    assert len(layers) == graph.n_layer + 1 and set(found) == {t.name for t in graph.tensors}
    weights = dict.fromkeys((*devices, HOST), 0)
    for tensor in graph.tensors:
        home = found[tensor.name]
        if graph.tied_output and tensor.name == "output.weight" and home == found["token_embd.weight"]:
            continue  # one matrix in memory
        weights[home] += tensor.nbytes
        if tensor.name.startswith("rope_"):  # every device with a layer gets a copy
            for device in {*layers[:-1]} - {home}:
                weights[device] += tensor.nbytes
    real = load_flags(path, flags, devices)
    assert weights == {name: real.get(name, {}).get("weights", 0) for name in weights}
    kv = {name: real.get(name, {}).get("kv", 0) for name in weights}
    each = sum(kv.values()) // graph.n_layer
    assert kv == {name: each * layers[:-1].count(name) for name in weights}


def flags_of(result: FitResult) -> StockFlags:
    return StockFlags(result.n_gpu_layers, result.tensor_split, result.overrides)


# ---- homes against the loader --------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_homes_of_every_ngl(arch: str, tiny: Callable[..., Path], rpc) -> None:
    path, device = tiny(arch), rpc.devices[0]
    graph = autoplan.read_graph(path, SETTINGS)
    for n in range(-1, graph.n_layer + 3):
        check_homes(path, graph, StockFlags(n), [device])


def test_homes_of_the_cpu_families(tiny: Callable[..., Path], moe: Path, rpc) -> None:
    device = rpc.devices[0]
    for path, family, kinds in (
        (tiny("llama"), cpu_ffn, {"ffn_up", "ffn_down", "ffn_gate"}),
        (moe, cpu_moe, {"ffn_up_exps", "ffn_down_exps", "ffn_gate_exps"}),
    ):
        graph = autoplan.read_graph(path, SETTINGS)
        for n in range(graph.n_layer + 2):
            flags = StockFlags(-1, overrides=family(n))
            found, _ = stock_homes(graph, flags, [device])
            moved = {name for name, home in found.items() if home == HOST} - {"token_embd.weight"}
            assert moved == {f"blk.{il}.{kind}.weight" for il in range(min(n, graph.n_layer)) for kind in kinds}
            check_homes(path, graph, flags, [device])
        last = StockFlags(-1, overrides=family(1, graph.n_layer - 1))
        found, _ = stock_homes(graph, last, [device])
        moved = {name for name, home in found.items() if home == HOST} - {"token_embd.weight"}
        assert moved == {f"blk.{graph.n_layer - 1}.{kind}.weight" for kind in kinds}
        check_homes(path, graph, last, [device])


@pytest.mark.parametrize("arch", ["llama", "minicpm3"])  # minicpm3 has a tied output
def test_homes_of_overrides(arch: str, tiny: Callable[..., Path], rpc) -> None:
    path, device = tiny(arch), rpc.devices[0]
    graph = autoplan.read_graph(path, SETTINGS)
    for overrides in (
        (("ffn_up", HOST),),
        (("ffn_up", device), ("ffn_", HOST)),  # the first match wins
        (("ffn_", HOST), ("ffn_up", device)),
        (("blk.1", HOST), ("output", HOST)),  # found anywhere in a name: also blk.1x, attn_output and output_norm
        (("^output\\.weight$", HOST),),  # not a tied one, which has another name
        (("^token_embd\\.weight$", HOST),),
        (("attn_(q|k)\\.weight$", device),),  # to a device whose layers are on the CPU
    ):
        for n in (-1, 0, 2):
            check_homes(path, graph, StockFlags(n, overrides=overrides), [device])


def two_devices(path: Path, moe: Path) -> list[str]:
    """For a process of its own: two loopback devices; what fit chose for the mixture of experts."""
    with LocalRpcServer(threads=1) as a, LocalRpcServer(threads=1) as b:
        devices = (*a.devices, *b.devices)
        graph = autoplan.read_graph(path, SETTINGS)
        for split in ((1.0, 1.0), (3.0, 1.0), (0.0, 1.0), (1.0, 0.0), (0.1, 0.2), (5.0,)):
            for n in range(-1, graph.n_layer + 2):
                check_homes(path, graph, StockFlags(n, split), devices)
        check_homes(path, graph, StockFlags(-1, (1.0, 1.0), (("ffn_up", devices[1]), ("ffn_down", HOST))), devices)

        graph, full = autoplan.read_graph(moe, SETTINGS), skeleton.dry_run(moe, on(*devices))
        results = []
        for share in (1.1, 0.8, 0.5):
            budgets = {name: int(share * sum(full[name].values())) for name in devices}
            result = stock_fit.fit(moe, on(*devices), budgets)
            flags = flags_of(result)
            check_homes(moe, graph, flags, devices)
            used = load_flags(moe, flags, devices)
            assert all(sum(used[name].values()) <= budgets[name] for name in devices), (share, used, budgets)
            results.append(json.dumps([result.status, result.n_gpu_layers, result.tensor_split, result.overrides]))
        return results


def test_homes_and_fit_on_two_devices(tiny: Callable[..., Path], moe: Path) -> None:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        texts = pool.submit(two_devices, tiny("llama"), moe).result(timeout=120)
    plenty, some, half = map(json.loads, texts)
    assert plenty[:2] == ["success", -1] and len(plenty[2]) == 2 and plenty[3] == []
    assert sum(some[2]) == some[1] and some[3] and half[3]


# ---- fit -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_large_budget_puts_everything_on_the_device(arch: str, tiny: Callable[..., Path], rpc) -> None:
    path, device = tiny(arch), rpc.devices[0]
    result = stock_fit.fit(path, on(device), {device: EVERYTHING})
    assert (result.status, result.n_gpu_layers, result.tensor_split, result.overrides) == ("success", -1, (), ())
    assert result.n_ctx == SETTINGS.n_ctx and "no changes needed" in result.log and not result.reason
    found, layers = stock_homes(autoplan.read_graph(path, SETTINGS), flags_of(result), [device])
    assert {name for name, home in found.items() if home == HOST} == {"token_embd.weight"}
    assert set(layers) == {device}


@pytest.mark.parametrize("arch", ["llama", "minicpm3", "qwen2"])
@pytest.mark.parametrize("share", [0.4, 0.7])
def test_a_dense_model_gets_the_layers_that_fit(arch: str, share: float, tiny: Callable[..., Path], rpc) -> None:
    path, device = tiny(arch), rpc.devices[0]
    graph = autoplan.read_graph(path, SETTINGS)

    def used(n: int) -> int:
        return sum(load_flags(path, StockFlags(n), [device]).get(device, {}).values())

    budget = int(used(0) + share * (used(-1) - used(0)))
    # Settings that fit decides itself are not in its way.
    result = stock_fit.fit(
        path, replace(on(device), n_gpu_layers=1, override_tensor=(("ffn", HOST),)), {device: budget}
    )
    assert result.status == "success" and not result.overrides
    assert 0 <= result.n_gpu_layers <= graph.n_layer
    assert used(result.n_gpu_layers) <= budget < used(result.n_gpu_layers + 1)
    check_homes(path, graph, flags_of(result), [device])


def test_a_mixture_of_experts_gets_overrides(moe: Path, rpc) -> None:
    device = rpc.devices[0]
    graph = autoplan.read_graph(moe, SETTINGS)
    full = sum(skeleton.dry_run(moe, on(device))[device].values())
    counts = []
    for share in (0.9, 0.7, 0.5):
        result = stock_fit.fit(moe, on(device), {device: int(share * full)})
        assert result.status == "success" and result.n_gpu_layers == graph.n_layer + 1
        assert result.overrides and {home for _, home in result.overrides} == {HOST}
        check_homes(moe, graph, flags_of(result), [device])
        assert sum(load_flags(moe, flags_of(result), [device])[device].values()) <= int(share * full)
        found, _ = stock_homes(graph, flags_of(result), [device])
        counts.append(sum(home == HOST for home in found.values()))
    assert counts == sorted(set(counts)), "a smaller budget leaves more experts on the CPU"


def test_the_context_shrinks_only_when_it_is_left_to_fit(tiny: Callable[..., Path], rpc) -> None:
    path, device = tiny("llama"), rpc.devices[0]
    settings = replace(on(device), n_ctx=0)
    whole = stock_fit.fit(path, settings, {device: EVERYTHING}, n_ctx_min=256)
    used = skeleton.dry_run(path, settings)[device]
    budget = sum(used.values()) - used["kv"] // 2
    less = stock_fit.fit(path, settings, {device: budget}, n_ctx_min=256)
    assert less.n_gpu_layers == whole.n_gpu_layers == -1
    assert 256 <= less.n_ctx < whole.n_ctx == autoplan.read_graph(path, SETTINGS).n_ctx_train
    fixed = stock_fit.fit(path, replace(settings, n_ctx=whole.n_ctx), {device: budget}, n_ctx_min=256)
    assert fixed.n_ctx == whole.n_ctx and fixed.n_gpu_layers >= 0


def test_fit_is_silent_and_leaves_the_logger(tiny: Callable[..., Path], rpc, capfd, tmp_path: Path) -> None:
    path, device = tiny("qwen3moe"), rpc.devices[0]
    llama_cpp = runtime.llama_cpp()
    lines: list[str] = []
    ours = llama_cpp.llama_log_callback(lambda level, text, data: lines.append(text.decode()))
    before, data = llama_cpp.llama_log_callback(), ctypes.c_void_p()
    llama_cpp.llama_log_get(ctypes.byref(before), ctypes.byref(data))
    llama_cpp.llama_log_set(ours, ctypes.c_void_p())
    try:
        budget = sum(skeleton.dry_run(path, on(device))[device].values()) // 2
        capfd.readouterr()
        assert "set ngl_per_device" in stock_fit.fit(path, on(device), {device: budget}).log
        assert capfd.readouterr() == ("", "") and not lines
        llama_cpp.llama_model_load_from_file(str(tmp_path / "none").encode(), llama_cpp.llama_model_default_params())
        assert any("none" in line for line in lines), "our callback is in place again"
    finally:
        llama_cpp.llama_log_set(before, data)


def test_giving_up_is_a_result(tiny: Callable[..., Path], rpc, monkeypatch: pytest.MonkeyPatch) -> None:
    path, device = tiny("llama"), rpc.devices[0]
    make_params = load_settings.make_params

    def with_tensor_split_mode(settings: Settings) -> Any:
        params = make_params(settings)
        params.model.split_mode = 3  # LLAMA_SPLIT_MODE_TENSOR, which fit does not know
        return params

    monkeypatch.setattr(load_settings, "make_params", with_tensor_split_mode)
    result = stock_fit.fit(path, on(device), {device: 1 << 20})
    assert result.status == "failure" and "not implemented for SPLIT_MODE_TENSOR" in result.reason


def test_a_file_that_cannot_be_loaded(tiny: Callable[..., Path], rpc, tmp_path: Path) -> None:
    device, cut = rpc.devices[0], tmp_path / "cut.gguf"
    cut.write_bytes(tiny("llama").read_bytes()[:5000])
    with pytest.raises(OallamaError, match=r"cut\.gguf: .*failed to load model; .*failed to read") as error:
        stock_fit.fit(cut, on(device), {device: 1 << 20})
    assert "\n" not in str(error.value)
    with pytest.raises(OallamaError, match="no such model file"):
        stock_fit.fit(tmp_path / "none.gguf", on(device), {device: 1 << 20})


@pytest.mark.parametrize(
    ("devices", "budgets", "words"),
    [
        ((), {}, "needs a budget for each device"),
        (("RPC0",), {"CPU": 1}, "needs a budget for each device"),
        (("RPC0",), {"RPC0": 1, "CPU": 1}, "needs a budget for each device"),
        (("RPC0", "RPC0"), {"RPC0": 1}, "needs a budget for each device"),
        (("RPC0",), {"RPC0": -1}, "the budget of RPC0 is -1 bytes"),
        (("NPU7",), {"NPU7": 1}, "unknown device 'NPU7'"),
    ],
)
def test_budgets_that_fit_refuses(devices, budgets, words: str, tiny: Callable[..., Path], rpc) -> None:
    with pytest.raises(OallamaError, match=re.escape(words)):
        stock_fit.fit(tiny("llama"), on(*devices), budgets)


# ---- flags, without an engine --------------------------------------------------------------------------------------


def test_the_families_are_upstreams() -> None:
    source = (ROOT / "third_party" / "llama.cpp" / "patched" / "common" / "common.h").read_text()
    assert 'string_format("blk\\\\.%d%s", idx, ffn_regex)' in source
    for name, family in (("LLM_FFN_EXPS_REGEX", cpu_moe), ("LLM_FFN_DENSE_REGEX", cpu_ffn)):
        regex = re.search(rf'{name} = ("[^"]+");', source)
        assert regex
        assert family(12)[11] == (rf"blk\.11{json.loads(regex[1])}", HOST)
        assert family(0) == ()
        with pytest.raises(OallamaError, match="got -1"):
            family(-1)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (StockFlags(-1), "2 devices (A, B) need a tensor_split"),
        (StockFlags(-1, (0.0, 0.0, 1.0)), "need a tensor_split"),
        (StockFlags(-1, (1.0,), (("ffn", "C"),)), "an override names device 'C'; the devices are A, B"),
        (StockFlags(-1, (1.0,), (("ffn(", HOST),)), "'ffn(' is not a regular expression"),
    ],
)
def test_flags_without_an_answer(flags: StockFlags, words: str) -> None:
    graph = OperatorGraph.from_engine(raw_graph(Shape()))
    with pytest.raises(OallamaError, match=re.escape(words)):
        stock_homes(graph, flags, ["A", "B"])


def test_settings_that_llama_cpp_cannot_take(rpc) -> None:
    with pytest.raises(OallamaError, match=r"tensor_split has 17 entries; llama\.cpp takes 16 devices"):
        load_settings.make_params(replace(SETTINGS, tensor_split=(1.0,) * 17))
    with pytest.raises(OallamaError, match="unknown device 'NPU7'"):
        load_settings.make_params(replace(SETTINGS, override_tensor=(("ffn", "NPU7"),)))
