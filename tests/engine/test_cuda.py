"""The same promises on an NVIDIA GPU; skipped where there is none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from oallama import Llama
from oallama.data.entries import padded_rows
from oallama.engine import device_list, native, runtime
from oallama.engine.load_settings import Settings
from oallama.loading import autoplan, start
from oallama.profiling.profiler import profile_machine
from support.expert_slots import plan_of
from support.logits import ARCHITECTURES, MAX_NMSE, NOISE, TOKENS, compute_logits, greedy_differences, nmse
from support.made_profile import made_profile
from support.placements import placed_jobs
from support.rank_logits import ARCHITECTURES as RANK_ARCHITECTURES
from support.rank_logits import CONTEXT, rank_logits
from support.streaming import PROMPTS, assert_same
from support.streaming import jobs as streamed_jobs

DEVICE = "CUDA0"

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(
        not any(d.backend == "CUDA" for d in device_list.devices()), reason="no CUDA device on this machine"
    ),
]


@pytest.mark.parametrize("file_type", ["F16", "Q8_0", "Q4_K_M"])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_mixes_with_cuda_keep_the_model(
    arch: str, file_type: str, tiny: Callable[..., Path], lib: Path, tmp_path: Path
) -> None:
    """A GPU rounds differently: placements are as near to the CPU as all of the model on the GPU is."""
    path = tiny(arch, file_type)
    whole = [{"model": str(path), "n_gpu_layers": 0}, {"model": str(path), "devices": [DEVICE]}]
    jobs = [*whole, *placed_jobs(path, [DEVICE], [], tmp_path)]
    reference, on_gpu, *placed = compute_logits(lib, jobs, tmp_path)
    assert nmse(on_gpu, reference) <= 2 * MAX_NMSE
    nearest = max(MAX_NMSE, 2 * nmse(on_gpu, reference))
    noise = max(NOISE, 6 * float(np.sqrt(np.mean((on_gpu - reference) ** 2))))
    for job, result in zip(jobs[2:], placed, strict=True):
        assert nmse(result, reference) <= nearest, job["table"]
        if arch != "qwen3moe":  # rounding may make a router choose another expert
            assert greedy_differences(result, reference, noise) == 0, job["table"]


@pytest.mark.parametrize("file_type", ["F16", "Q8_0", "Q4_K_M"])
@pytest.mark.parametrize("slots", [0, 5])
def test_experts_on_both(slots: int, file_type: str, tiny: Callable[..., Path], lib: Path, tmp_path: Path) -> None:
    """One token, a few and many at a time have kernels of their own; tokens choose experts of the host many times."""
    path, file = tiny("qwen3moe", file_type), tmp_path / "experts.map"
    file.write_text(plan_of(path, DEVICE, slots, (0, 2, 7)).to_backend_map())
    wanted = [{"model": str(path), "n_gpu_layers": 0}, {"model": str(path), "devices": [DEVICE]}]
    wanted += [{"model": str(path), "table": str(file), "devices": [DEVICE], "n_ubatch": n} for n in (1, 12, 64)]
    reference, on_gpu, *divided = compute_logits(lib, wanted, tmp_path)
    assert nmse(on_gpu, reference) <= 2 * MAX_NMSE
    for job, result in zip(wanted[2:], divided, strict=True):
        assert nmse(result, reference) <= max(MAX_NMSE, 2 * nmse(on_gpu, reference)), job["n_ubatch"]


@pytest.mark.parametrize("flash_attn", [0, 1])
def test_no_plan_equals_the_unpatched_build(
    flash_attn: int, tiny: Callable[..., Path], lib: Path, baseline_lib: Path, tmp_path: Path
) -> None:
    if not (baseline_lib / "libggml-cuda.so").exists():
        pytest.skip("the baseline was built without CUDA")

    def jobs() -> list[dict[str, object]]:
        models = [str(tiny(arch)) for arch in ARCHITECTURES]
        return [{"model": m, "devices": [DEVICE], "flash_attn": flash_attn} for m in models]

    ours = compute_logits(lib, jobs(), tmp_path)
    (tmp_path / "baseline").mkdir()
    theirs = compute_logits(baseline_lib, jobs(), tmp_path / "baseline")
    assert all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_plan_keeps_its_budget_and_every_node_is_timed(arch: str, tiny: Callable[..., Path]) -> None:
    path = tiny(arch)
    settings = Settings(n_ctx=512, n_batch=512, n_threads=2)
    profile = made_profile(path, DEVICE, settings)
    choices = autoplan.Choices(device=DEVICE, profile=profile, planner="oato")
    plan = start.plan_model(path, "50%", settings, choices)

    llm = Llama(str(path), plan=plan, n_threads=2, verbose=False)
    device = llm.placement()[DEVICE]
    assert device.predicted is not None and device.budget is not None
    assert abs(device.measured.total - device.predicted.buffers) <= max(4 << 20, device.predicted.total // 100)
    assert device.measured.total <= device.budget

    core = native.core()
    llm.eval([1])
    core.op_timer_take()
    core.op_timer_enable(True)
    try:
        llm.eval([2])
        records = core.op_timer_take()
    finally:
        core.op_timer_enable(False)
    on_device = {weight for dev, _, op, weight, *_ in records if dev == DEVICE and op.startswith("MUL_MAT")}
    targets = {op.weight for op in autoplan.read_graph(path, settings).targets(1)}
    assert {name for name in targets if plan.tensors[name].device == DEVICE} & on_device
    assert all(seconds >= 0 for *_, seconds, _ in records)
    llm.close()


def test_all_architectures_can_be_profiled(tiny: Callable[..., Path], tmp_path: Path) -> None:
    """minicpm3 has heads that ggml-cuda's flash attention does not take."""
    for arch in ARCHITECTURES:
        graph = autoplan.read_graph(tiny(arch), Settings(n_ctx=512))
        profile = profile_machine(graph, [DEVICE], depths=(64,), cache=tmp_path)
        shape, depth = graph.attention[0], padded_rows(64)
        fused = profile.fuses(DEVICE, shape)
        assert fused or arch == "minicpm3"
        assert profile.attention_time(DEVICE, shape, 1, depth, flash=fused).source == "measured"


@pytest.mark.parametrize("fusion", [False, True])
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(("slots", "jitter_us"), [(2, 0), (3, 400)])
def test_streamed_is_resident(
    arch: str, slots: int, jitter_us: int, fusion: bool, tiny: Callable[..., Path], lib: Path, tmp_path: Path
) -> None:
    """Bit for bit without fusion. With it a stream's cuts leave fewer neighbours to fuse, which rounds differently."""
    prompts = (*PROMPTS, 512, 2048)
    context = {"n_ctx": 2304, "n_ubatch": 512, "flash_attn": 1}
    wanted = streamed_jobs(tiny(arch, "Q4_0"), DEVICE, tmp_path, slots, prompts, **context)
    env = {"OALLAMA_STREAM_JITTER": str(jitter_us), "GGML_CUDA_DISABLE_FUSION": str(int(not fusion))}
    found = compute_logits(lib, wanted, tmp_path, env)
    if not fusion:
        assert_same(found, prompts)
        return
    resident, streamed = found[: len(prompts)], found[len(prompts) :]
    for i, logits in enumerate(streamed):
        assert nmse(logits, resident[i % len(prompts)]) <= MAX_NMSE, f"{prompts[i % len(prompts)]} tokens"


@pytest.mark.skipif(not (runtime.lib_dir() / "liboallama-ranks.so").is_file(), reason="this build has no MPI")
@pytest.mark.parametrize("n_ranks", [2, 4])
def test_ranks_add_up_in_gpu_memory(n_ranks: int, tiny: Callable[..., Path], lib: Path, tmp_path: Path) -> None:
    """Ranks on one GPU: the logits are those of sums in host memory. With four some have no part of the attention."""

    def logits(where: str) -> list[np.ndarray]:
        jobs = [{"model": str(tiny(arch, "F16")), "tokens": TOKENS, **CONTEXT} for arch in RANK_ARCHITECTURES]
        settings = {"OALLAMA_RANK_DEVICE": DEVICE, "OALLAMA_RANK_SUMS": where}
        return rank_logits(lib, jobs, n_ranks, tmp_path, **settings)

    for there, staged in zip(logits("device"), logits("host"), strict=True):
        assert np.array_equal(there, staged)
