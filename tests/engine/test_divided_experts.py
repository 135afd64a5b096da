"""Experts of a layer on two devices: each computes the choices of its own, at the same time."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oallama import Llama, demo_model
from oallama.bench.maps import backend_map
from oallama.data.entries import Concurrency
from oallama.data.operators import TensorInfo
from oallama.data.plan import HOST, ContextSettings, PlacementPlan, TensorPlacement
from oallama.data.plan_export import ranges
from oallama.engine import skeleton
from oallama.engine.load_settings import Settings
from oallama.engine.rpc import LocalRpcServer
from oallama.errors import OallamaError
from oallama.loading import autoplan
from oallama.loading.autoplan import Choices
from oallama.modelmaker import make_model
from oallama.planning import Workload
from oallama.planning.cost import CostModel
from oallama.planning.divided import groups
from support.archs import write_models
from support.experts import with_experts
from support.hand_plan import CONTEXT, hand_plan
from support.logits import TOKENS, compute_logits, greedy_differences, nmse
from support.made_profile import made_profile
from support.synthetic import DEVICE, profile
from support.vulkan import VULKAN, has_vulkan

ARCHS = ("deepseek2", "glm4moe", "gpt-oss", "grovemoe", "llama4", "qwen2moe", "qwen3moe", "qwen3next")
_OF_EXPERTS = re.compile(r"\.ffn_(up|gate|down|gate_up)_exps\.(weight|bias)$")
# Made by oallama; DeepSeek-V2-Lite's with less of everything.
MADE = [
    ("deepseek2", "tiny", "Q8_0"),
    ("deepseek2", "deepseek-v2-lite", "Q4_0"),
    ("qwen35moe", "tiny", "Q8_0"),
    ("gpt-oss", "tiny", "MXFP4"),
]
# Whose best plan in the budget tried, with the times of a made profile, has whole weights.
WHOLE = [("deepseek2", "tiny")]
_LESS = {"n_layer": 3, "n_embd": 256, "n_ff": 512, "n_head": 4, "n_vocab": 4096, "n_expert": 16, "n_ff_expert": 256}


def made(folder: Path, arch: str, shape: str, file_type: str) -> Path:
    less = _LESS if shape != "tiny" else {}
    return make_model(folder / "made.gguf", arch=arch, shape=shape, file_type=file_type, overrides=less)


def table(
    path: Path, device: str, experts: Sequence[int], cpu: Callable[[str], bool] = lambda name: False, mode: str = "host"
) -> str:
    """All experts on the host, some also on `device`; cpu: of the other weights and layers, what stays on the host."""
    graph = autoplan.read_graph(path, Settings(n_ctx=64))

    def place(t: TensorInfo) -> str | tuple[str, str]:
        if _OF_EXPERTS.search(t.name):
            return (f"CPU {mode}", f"{device} experts {ranges(experts)}") if experts else f"CPU {mode}"
        return "CPU host" if cpu(t.name) else f"{device} resident"

    return backend_map(graph, lambda il: "CPU" if cpu(f"layer {il}") else device, place)


def jobs(path: Path, folder: Path, n_experts: int, **common: Any) -> list[dict[str, Any]]:
    """One expert, some and all but one on the device; the rest beside them, on the host, or mixed."""
    rng = np.random.default_rng(len(path.name))
    sides: list[Callable[[str], bool]] = [
        lambda name: False,
        lambda name: True,
        lambda name: sum(name.encode()) % 2 == 0,
    ]
    made = []
    for i, (k, cpu) in enumerate(zip((1, n_experts // 2, n_experts - 1), sides, strict=True)):
        experts = sorted(rng.choice(n_experts, k, replace=False).tolist())
        for mode in ("host", "upload"):
            file = folder / f"{path.stem}-{i}-{mode}.map"
            file.write_text(table(path, "RPC0", experts, cpu, mode))
            made.append({"model": str(path), "table": str(file), "devices": ["RPC0"], **common})
    return made


def check(path: Path, lib: Path, tmp_path: Path, n_experts: int = 16, most: float = 1e-6, **settings: Any) -> bool:
    """One loopback device and the host against the host alone. Returns whether any logits differ in a bit."""
    common = {"use_extra_bufts": False, "n_ubatch": 64, "flash_attn": 1, **settings}
    with LocalRpcServer(threads=1, register=False) as server:
        wanted = [{"model": str(path), "n_gpu_layers": 0, **common}]
        wanted += jobs(path, tmp_path, n_experts, rpc=[server.endpoint], **common)
        whole, *divided = compute_logits(lib, wanted, tmp_path)
    for job, found in zip(wanted[1:], divided, strict=True):
        assert nmse(found, whole) <= most, job["table"]
    return not all(np.array_equal(found, whole) for found in divided)


@pytest.mark.parametrize("file_type", ["Q4_0", "Q8_0"])
@pytest.mark.parametrize("layout", ["plain", "repacked"])
def test_two_cpus_compute_what_one_does(
    file_type: str, layout: str, tiny: Callable[..., Path], lib: Path, tmp_path: Path
) -> None:
    most = 1e-6 if layout == "plain" else 1e-3
    check(tiny("qwen3moe", file_type), lib, tmp_path, most=most, use_extra_bufts=layout != "plain")


def test_many_architectures(lib: Path, tmp_path: Path) -> None:
    """With biases and scales of experts, weights before the experts, groups, shared experts."""
    models = [m for m in write_models(tmp_path / "two", f"^({'|'.join(ARCHS)})$") if m.stem.endswith("-moe")]
    few = (np.arange(70) * 37 % 100 + 1).tolist()  # tokens of upstream's tiny vocabularies
    for source in models:
        path = with_experts(source, tmp_path / f"{source.stem}.gguf")
        assert check(path, lib, tmp_path, tokens=few), "as the sum of four: was anything divided?"


@pytest.mark.parametrize(("arch", "shape", "file_type"), MADE)
def test_made_mixtures(arch: str, shape: str, file_type: str, lib: Path, tmp_path: Path) -> None:
    """MLA with sigmoid and shared experts, without q_lora_rank, recurrent layers, and MXFP4 with sinks."""
    check(made(tmp_path, arch, shape, file_type), lib, tmp_path)


def test_the_demo_mixture(lib: Path, tmp_path: Path) -> None:
    """A trained one, whose routing is real."""
    check(demo_model("mixture"), lib, tmp_path, n_experts=32, tokens=[t % 600 for t in TOKENS])


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ("experts 3,1", "rising, as 0,3-5"),
        ("experts 0,0", "rising, as 0,3-5"),
        ("experts", "rising, as 0,3-5"),
        ("experts one", "rising, as 0,3-5"),
        ("experts 0-15", "has 16 experts; the segment's are not some of them"),
        ("experts 16", "has 16 experts; the segment's are not some of them"),
    ],
)
def test_wrong_experts_are_refused(part: str, message: str, tiny: Callable[..., Path], rpc: Any) -> None:
    path, device = tiny("qwen3moe"), rpc.devices[0]
    settings, text = Settings(n_ctx=64, devices=(device,)), table(path, device, ())
    assert skeleton.dry_run(path, settings, text)
    with pytest.raises(OallamaError) as error:
        skeleton.dry_run(path, settings, f"{text}segment blk.0.ffn_up_exps.weight {device} {part}\n")
    assert message in str(error.value)


def test_a_dry_run_counts_the_experts_and_the_zeros(tiny: Callable[..., Path], rpc: Any) -> None:
    path, device = tiny("qwen3moe", "F16"), rpc.devices[0]
    settings = Settings(n_ctx=64, devices=(device,))
    host, divided = (skeleton.dry_run(path, settings, table(path, device, e)) for e in ((), (0, 5, 6)))
    tensors = autoplan.read_graph(path, Settings(n_ctx=64)).tensors
    experts = sum(t.nbytes for t in tensors if _OF_EXPERTS.search(t.name))
    assert divided[device]["weights"] - host[device]["weights"] == pytest.approx(experts * 4 / 16, rel=0.02)


def test_a_block_is_one_piece_on_each_side(
    tiny: Callable[..., Path], rpc: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    """From up and gate to the sum: of a layer with divided experts three splits, and two without."""
    path, device = tiny("qwen3moe", "Q4_0"), rpc.devices[0]
    whole = experts_on_host(hand_plan(path, device), device)
    divided = experts_on_host(hand_plan(path, device), device, (1, 2, 3))
    n_layer = len(whole.layers) - 1
    assert splits(path, divided, capfd) - splits(path, whole, capfd) == n_layer


def experts_on_host(plan: PlacementPlan, device: str, experts: tuple[int, ...] = ()) -> PlacementPlan:
    """The plan with all experts on the host, some also on `device`, which has everything else."""
    tensors = {}
    for name, t in plan.tensors.items():
        if _OF_EXPERTS.search(name):
            host = TensorPlacement.whole(t.type, t.nbytes, HOST, "host")
            tensors[name] = TensorPlacement.by_experts(host, device, experts, 16) if experts else host
        else:
            stays = name.startswith("token_embd")
            tensors[name] = t if stays else TensorPlacement.whole(t.type, t.nbytes, device, "resident")
    return replace(plan, tensors=tensors)


def test_planners_know_the_experts_of_many_architectures(lib: Path, tmp_path: Path) -> None:
    """Whatever lies between their matrices: every layer that has experts may be divided."""
    for path in write_models(tmp_path, f"^({'|'.join((*ARCHS, 'deepseek32', 'llama', 'mistral3'))})$"):
        graph = autoplan.read_graph(path, Settings(n_ctx=64))
        costs = CostModel(graph, profile(graph), (DEVICE,), ContextSettings(64, 64, 64))
        layers = {int(t.name.split(".")[1]) for t in graph.tensors if t.name.endswith("ffn_down_exps.weight")}
        assert {group.layer for group in groups(costs, by_experts=True) if group.n_used} == layers, path.name
        assert layers or not path.stem.endswith("-moe")


def splits(path: Path, plan: PlacementPlan, capfd: pytest.CaptureFixture[str]) -> int:
    capfd.readouterr()
    Llama(str(path), n_ctx=CONTEXT.n_ctx, plan=plan, verbose=True).close()
    return int(re.findall(r"splits = (?:\d+ / )?(\d+)", capfd.readouterr().err)[-1])


def test_a_plan_file_keeps_experts(tiny: Callable[..., Path], rpc: Any, tmp_path: Path) -> None:
    path, device = tiny("qwen3moe", "Q4_0"), rpc.devices[0]
    plan = experts_on_host(hand_plan(path, device), device, (0, 3, 4, 5))
    plan.save(tmp_path / "plan.json")
    again = PlacementPlan.load(tmp_path / "plan.json")
    assert again == plan and again.hash == plan.hash
    assert f"segment blk.0.ffn_up_exps.weight {device} experts 0,3-5" in again.to_backend_map()
    host, there = again.tensors["blk.0.ffn_up_exps.weight"].segments
    assert len(host.experts) == 12 and there.nbytes * 16 == again.tensors["blk.0.ffn_up_exps.weight"].nbytes * 5
    with pytest.raises(OallamaError, match="divided between two devices"):
        plan.to_llama_cpp_flags()


@pytest.mark.parametrize("planner", ["auto", "experts"])
@pytest.mark.parametrize(("arch", "shape", "file_type"), [("qwen3moe", "tiny", "Q4_0"), *MADE])
def test_a_plan_is_loaded_as_predicted(
    arch: str, shape: str, file_type: str, planner: str, rpc: Any, tmp_path: Path
) -> None:
    path, device = made(tmp_path, arch, shape, file_type), rpc.devices[0]
    settings = Settings(n_ctx=256, n_batch=256, n_ubatch=256, n_threads=1)
    profile = replace(made_profile(path, device, settings), concurrency=(Concurrency(device, 1.0),))
    choices = Choices(device=device, planner=planner, profile=profile, workload=Workload(16, 128))
    graph = autoplan.read_graph(path, settings)
    plan = autoplan.candidates(path, graph, "60%", settings, choices).best
    if planner == "experts":
        divided = any(s.experts for t in plan.tensors.values() for s in t.segments)
        assert plan.planner["name"] == "experts" and (divided or (arch, shape) in WHOLE)
    llm = Llama(str(path), n_ctx=256, plan=plan, verbose=False)
    try:
        there = llm.placement().devices[0]
        assert there.predicted is not None and there.measured.weights == there.predicted.weights
        assert llm("once", max_tokens=4)["usage"]["completion_tokens"] > 0
    finally:
        llm.close()


@pytest.mark.slow
@pytest.mark.skipif(not has_vulkan(), reason="needs Vulkan with lavapipe")
def test_vulkan_and_the_host(tiny: Callable[..., Path], lib: Path, tmp_path: Path) -> None:
    """A device that computes the last expert, which is nothing; many tokens at a time choose it more than once each."""
    path = tiny("qwen3moe", "Q8_0")
    file = tmp_path / "vulkan.map"
    file.write_text(table(path, "Vulkan0", (0, 2, 7, 8, 15)))
    common = {"model": str(path), "tokens": TOKENS[:40], "flash_attn": 1}
    # Upstream's Vulkan MUL_MAT_ID for more than some tokens corrupts the heap on lavapipe (Mesa 22.3).
    on_both = [{**common, "table": str(file), "devices": ["Vulkan0"], "n_ubatch": n} for n in (4, 16)]
    whole, *divided = compute_logits(lib, [{**common, "n_gpu_layers": 0}, *on_both], tmp_path, VULKAN)
    for found in divided:
        assert nmse(found, whole) <= 1e-3 and greedy_differences(found, whole) == 0
