"""Tables whose rows are read from the file when they are wanted: a plan takes no memory for them, nor does a load."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from oallama.data.plan import HOST
from oallama.engine import skeleton
from oallama.engine.load_settings import Settings
from oallama.engine.rpc import LocalRpcServer
from oallama.errors import OallamaError
from oallama.loading import autoplan
from oallama.loading.autoplan import Choices
from support.archs import write_models
from support.foreign_models import with_long_table
from support.made_profile import made_profile

TABLE = "per_layer_token_embd.weight"
# llama.cpp reads tables above 4 GiB by rows.
N_ROWS = 17 << 20
LONG = 4 << 30
MIB = 1 << 20
SETTINGS = Settings(n_ctx=128, n_batch=32, n_ubatch=32, n_threads=1)

# Loads a model by a table and computes a token. Prints the most memory that was this process's alone, and what the
# engine says of its weights.
LOAD = """
import json, os, sys
from oallama.engine import device_list, runtime
from oallama import Llama
model, plan = sys.argv[1:3]
device_list.add_rpc_server(sys.argv[3])
llm = Llama(model, plan=plan, n_ctx=128, n_batch=32, n_ubatch=32, n_threads=1, verbose=False)
llm.eval([1, 2, 3])
status = dict(line.split(":", 1) for line in open("/proc/self/status").read().splitlines())
kib = {name: int(status[name].split()[0]) for name in ("VmRSS", "VmLck", "VmPin")}
weights = {device.device: device.measured.weights for device in llm.placement().devices}
print(json.dumps({**kib, "weights": weights}))
"""


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lazy")
    (model,) = write_models(folder, "^qwen4exp$")
    path = with_long_table(model, folder / "long.gguf", TABLE, N_ROWS)
    assert path.stat().st_size > LONG > 100 * path.stat().st_blocks * 512
    return path


def test_a_dry_run_takes_no_memory_for_a_lazy_table(long: Path, rpc) -> None:
    graph = autoplan.read_graph(long, SETTINGS)
    assert [t.name for t in graph.tensors if t.lazy] == [TABLE]
    assert graph.tensor[TABLE].nbytes > LONG > 100 * graph.weights_bytes
    for devices in ((), tuple(rpc.devices)):
        used = skeleton.dry_run(long, Settings(n_ctx=128, n_ubatch=32, devices=devices))
        assert sum(memory["weights"] for memory in used.values()) < 1.2 * graph.weights_bytes, used


def test_plans_leave_it_in_the_file(long: Path, rpc, tmp_path: Path) -> None:
    device = rpc.devices[0]
    graph = autoplan.read_graph(long, SETTINGS)
    choices = Choices(device=device, profile=made_profile(long, device, SETTINGS), fixed_ubatch=True)
    for budget in ("50%", "minimal"):
        found = autoplan.candidates(long, graph, budget, SETTINGS, choices)
        for name, plan in found.plans.items():
            assert plan.tensors[TABLE].device == HOST and plan.tensors[TABLE].mode == "host", name
            weights = sum(memory.weights for memory in plan.predicted.devices.values())
            assert weights < 1.2 * graph.weights_bytes, name
            assert any("stays in the file" in note for note in plan.predicted.notes), name
    # A share of the weights is one of what is read into memory.
    assert found.best.predicted.devices[device].weights <= graph.weights_bytes


def test_a_load_reads_the_rows_it_wants(long: Path, rpc, tmp_path: Path) -> None:
    device = rpc.devices[0]
    choices = Choices(device=device, profile=made_profile(long, device, SETTINGS), planner="layers")
    plan = autoplan.plan_graph(long, autoplan.read_graph(long, SETTINGS), "50%", SETTINGS, choices)
    assert plan.predicted.devices[device].weights > 0
    # In a process of its own the device has another name.
    (tmp_path / "plan.json").write_text(plan.to_json().replace(f'"{device}"', '"RPC0"'))
    with LocalRpcServer(threads=1, register=False) as server:
        command = [sys.executable, "-c", LOAD, str(long), str(tmp_path / "plan.json"), server.endpoint]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["VmRSS"] < 600 * MIB / 1024 and found["VmLck"] == found["VmPin"] == 0
    assert sum(found["weights"].values()) < 100 * MIB


def test_a_lazy_table_on_a_device_is_refused(long: Path, rpc) -> None:
    device, graph = rpc.devices[0], autoplan.read_graph(long, SETTINGS)
    lines = [f"layer {il} CPU" for il in range(graph.n_layer + 1)]
    lines += [f"tensor {t.name} {device + ' resident' if t.name == TABLE else 'CPU host'}" for t in graph.tensors]
    table = "\n".join(["# oallama backend map v1", *lines]) + "\n"
    with pytest.raises(OallamaError, match=f"cannot take {TABLE}"):
        skeleton.dry_run(long, Settings(n_ctx=128, n_ubatch=32, devices=(device,)), table)
