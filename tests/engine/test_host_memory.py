"""What happens when the host has less memory than the model: files stay mapped and are streamed, or a clear error."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oallama import Llama
from oallama.engine import native
from oallama.engine.load_settings import Settings
from oallama.engine.rpc import LocalRpcServer
from oallama.errors import OallamaError
from oallama.loading import autoplan, start
from oallama.modelmaker import make_model
from support.hand_plan import hand_plan, streamed_plan
from support.made_profile import made_profile
from support.processes import ran, ran_python

TOKENS = [int(t) for t in np.random.default_rng(5).integers(300, 1000, size=40)]
MIB = 2**20

MEMORY_OF_A_PROCESS = "import json; from oallama.engine import native; print(json.dumps(native.core().host_memory()))"

STREAM = """
import json, sys
from oallama import Llama
from oallama.engine import device_list
device_list.add_rpc_server(sys.argv[3])
llm = Llama(sys.argv[1], plan=sys.argv[2], verbose=False, use_mmap=True)
llm.eval(list(range(300, 308)))
peak = open(sys.argv[4]).read() if sys.argv[4] else "0"
print(json.dumps([llm.placement().left_mapped, llm._ctx.get_logits_ith(-1)[:100], int(peak)]))
"""


def last_logits(llm: Llama) -> np.ndarray:
    llm.reset()
    llm.eval(TOKENS)
    return np.ctypeslib.as_array(llm._ctx.get_logits_ith(-1), shape=(llm.n_vocab(),)).copy()


def test_weights_beyond_memory_stay_in_the_mapped_file(
    tiny: Callable[..., Path], rpc: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streamed ones give the same logits; what the host computes differs by its kernels' rounding only."""
    path, device = tiny("llama", "Q4_0"), rpc.devices[0]
    for plan, same in ((streamed_plan(path, device), True), (hand_plan(path, device), False)):
        llm = Llama(str(path), plan=plan, verbose=False)
        assert llm.placement().left_mapped == 0
        roomy = last_logits(llm)
        llm.close()
        repacked = [
            t.nbytes
            for name, t in plan.tensors.items()
            if t.device == "CPU" and t.type.lower() == "q4_0" and not name.startswith("token_embd")
        ]
        with monkeypatch.context() as patch:
            patch.setenv("OALLAMA_HOST_MEMORY", str(sum(repacked) // 2))
            patch.setattr("oallama.llama._check_host_memory", lambda *_: None)
            llm = Llama(str(path), plan=plan, verbose=False)
        placement = llm.placement()
        # Room for half of the bytes, half of which may be used.
        assert 0.6 < placement.left_mapped / sum(repacked) < 0.9
        assert placement.to_dict()["left_mapped"] == placement.left_mapped
        short = last_logits(llm)
        llm.close()
        assert np.array_equal(roomy, short) if same else np.allclose(roomy, short, atol=0.1 * roomy.std())


@pytest.mark.parametrize("mapped", [True, False])
def test_too_little_memory_says_how_much_is_needed(
    mapped: bool, tiny: Callable[..., Path], rpc: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny("llama")
    settings = Settings(n_ctx=256, n_threads=1)
    choices = autoplan.Choices(device=rpc.devices[0], profile=made_profile(path, rpc.devices[0], settings))
    plan = start.plan_model(path, "minimal", settings, choices)
    host = plan.predicted.devices["CPU"]
    needed = host.total - (host.weights if mapped else 0)
    monkeypatch.setenv("OALLAMA_HOST_MEMORY", str(needed - 1))
    of_plan = replace(plan, context=replace(plan.context, use_mmap=mapped))  # which brings it along
    for given, how in ((plan, {"use_mmap": mapped}), (of_plan, {})):
        monkeypatch.setenv("OALLAMA_HOST_MEMORY", str(needed - 1))
        with pytest.raises(
            OallamaError, match=r"the plan needs .* of host memory .*KV cache .* are free; .*(n_ctx|mmap)"
        ):
            Llama(str(path), plan=given, verbose=False, **how)
        monkeypatch.setenv("OALLAMA_HOST_MEMORY", str(needed))
        Llama(str(path), plan=given, verbose=False, **how).close()


# ---- control groups ------------------------------------------------------------------------------------------------


def memory_group() -> Path | None:
    """The folder of this process's memory control group, version 1 or 2; None where it cannot have children."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        root = Path("/sys/fs/cgroup/memory" if controllers == "memory" else "/sys/fs/cgroup")
        folder = root / path.lstrip("/")
        limits = ("memory.limit_in_bytes", "memory.max")
        if controllers in ("memory", "") and any((folder / name).exists() for name in limits):
            return folder if os.access(folder, os.W_OK) else None
    return None


@pytest.fixture
def group() -> Iterator[Path]:
    """A memory control group of our own, without a limit."""
    parent = memory_group()
    folder = parent / f"oallama-test-{os.getpid()}" if parent else None
    try:
        assert folder is not None
        folder.mkdir()
    except (AssertionError, OSError):
        pytest.skip("needs a writable memory control group")
    if not any((folder / name).exists() for name in ("memory.limit_in_bytes", "memory.max")):
        folder.rmdir()
        pytest.skip("needs a writable memory control group")
    yield folder
    folder.rmdir()


def run_in(group: Path, limit: int, code: str, *arguments: str) -> Any:
    name = next(n for n in ("memory.limit_in_bytes", "memory.max") if (group / n).exists())
    (group / name).write_text(str(limit))
    enter = f'echo $$ > "{group}/cgroup.procs" && exec "$@"'
    return json.loads(ran("sh", "-c", enter, "sh", sys.executable, "-c", code, *arguments, timeout=600).stdout)


def test_the_limit_of_a_control_group_counts(group: Path) -> None:
    free = native.core().host_memory()
    found = run_in(group, 300 * MIB, MEMORY_OF_A_PROCESS)
    assert 0 < found < 300 * MIB < free


def test_the_second_version_of_control_groups(tmp_path: Path) -> None:
    """Files as the kernel has them, mounted over its own in a namespace of their own."""
    path = next(
        (line[3:] for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::")), None
    )
    if os.geteuid() != 0 or path is None:
        pytest.skip("needs root and a kernel with control groups of version 2")
    folder = f"/sys/fs/cgroup/{path.strip('/')}"
    script = f"""
set -e
mount -t tmpfs tmpfs /sys/fs/cgroup
mkdir -p '{folder}'
cd '{folder}'
echo {200 * MIB} > memory.max
echo {150 * MIB} > memory.current
printf 'anon 1\\nactive_file {20 * MIB}\\ninactive_file {40 * MIB}\\n' > memory.stat
cd /
exec "$@"
"""
    command = ["unshare", "--mount", "sh", "-c", script, "sh", sys.executable, "-c", MEMORY_OF_A_PROCESS]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if "permission denied" in result.stderr.lower() or "not permitted" in result.stderr.lower():
        pytest.skip("this root may not mount")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == (200 - 150 + 60) * MIB


@pytest.mark.slow
def test_a_model_larger_than_memory_is_streamed_from_disk(group: Path, tmp_path: Path) -> None:
    """As large as twice what the process may have; the same logits as with room for all."""
    path, plan = tmp_path / "large.gguf", tmp_path / "plan.json"
    make_model(path, arch="llama", shape="small", file_type="Q4_0", overrides={"n_layer": 140})
    limit = path.stat().st_size // 2
    assert limit > 250 * MIB
    with LocalRpcServer(threads=2, register=False) as server:
        streamed_plan(path, "RPC0").save(plan)
        left, expected, _ = json.loads(ran_python(STREAM, path, plan, server.endpoint, "", timeout=600).stdout)
        assert left == 0
        peak_file = next((n for n in ("memory.max_usage_in_bytes", "memory.peak") if (group / n).exists()), None)
        left, logits, peak = run_in(
            group, limit, STREAM, str(path), str(plan), server.endpoint, str(group / peak_file) if peak_file else ""
        )
    assert left > 0 and peak <= limit
    assert logits == expected and np.std(logits) > 0.01
