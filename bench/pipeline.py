"""Pipelines over RPC devices on emulated hosts: predicted against measured latency, and what ignoring loss costs.

python bench/pipeline.py [--model FILE.gguf] [--rounds 3] [--only NAME,..] [--out FILE]

Hosts are network namespaces (oallama.netlab; root) on this machine's cores: in a pipeline one device computes at a
time. For every setting `oallama cluster plan` measures and decides, `oallama cluster run --plan` runs; "loss" has
a second plan, made from the same measurements without the QoS terms (wq1 = wq2 = wq3 = 0), run in turn with the first.
Without --model: the paper's LLaMA-3B shape (hidden 3200, 32 heads, feed-forward 8640) with 6 of 26 layers, Q8_0. Writes
the machine, then one JSON line per plan with every sample.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cluster import OALLAMA, answer, paper_model, prompt_text
from oallama.bench.machine import describe
from oallama.bench.script import arguments, note, record
from oallama.cluster.allocation.allocation import allocate
from oallama.cluster.allocation.cluster_plan import ClusterPlan
from oallama.cluster.pipeline.measure import read_model
from oallama.engine.load_settings import Settings
from oallama.netlab import Conditions, NetLab

CTX = 1024


@dataclass(frozen=True)
class Setting:
    """A cluster: threads and memory (share of the layers' bytes, beside compute buffers) of each device; its cable."""

    name: str
    devices: tuple[tuple[int, float], ...]
    cables: tuple[Conditions, ...]
    without_qos: bool = False


FAST = Conditions(rate_bit=1e9, delay_s=0.1e-3)
SETTINGS = (
    Setting("two alike, 1 Gbit", ((2, 0.8), (2, 0.8)), (FAST, FAST)),
    Setting("fast and slow, 100 Mbit", ((2, 0.7), (1, 1.3)), (Conditions(1e8, 1e-3),) * 2),
    Setting("three, one far away", ((2, 0.5), (1, 0.5), (2, 0.5)), (FAST, FAST, Conditions(1e8, 5e-3))),
    Setting(
        "loss: the faster link has jitter and loss",
        ((2, 1.3), (2, 1.3)),
        (Conditions(1e9, 1e-3, jitter_s=1e-3, loss=0.03), Conditions(1e8, 2e-3)),
        without_qos=True,
    ),
)


def measure(
    setting: Setting, model: Path, layer_bytes: int, compute_bytes: int, folder: Path, options: Any
) -> list[dict[str, Any]]:
    """One entry per plan."""
    cables: dict[Any, Conditions] = {0: Conditions(rate_bit=1e10)}
    for host, cable in enumerate(setting.cables, 1):
        cables |= {host: cable, (0, host): cable, (host, 0): cable}
    with NetLab(len(setting.devices) + 1, cables) as lab:
        devices = folder / "devices.toml"
        devices.write_text(
            "".join(
                f'[[device]]\nname = "h{host}"\nhost = "h{host}"\naddress = "{lab.address(host)}:50052"\n'
                f"threads = {threads}\nmemory = {int(share * layer_bytes) + compute_bytes}\n"
                for host, (threads, share) in enumerate(setting.devices, 1)
            )
        )
        plans = {"as priced": folder / "plan.json"}
        command = [OALLAMA, "cluster", "plan", str(model), "--devices", str(devices), "-o", str(plans["as priced"])]
        command += ["--ctx", str(CTX), "--ssh-agent", str(lab.ssh_agent()), "--json"]
        answer(lab, command)
        if setting.without_qos:
            plans["without QoS terms"] = folder / "blind.json"
            _without_qos(ClusterPlan.load(plans["as priced"])).save(plans["without QoS terms"])
        found: dict[str, dict[str, Any]] = {}
        for number in range(options.rounds):
            for name, path in plans.items():
                entry = found.setdefault(name, _entry(setting, name, ClusterPlan.load(path)))
                said = answer(lab, _command(lab, model, path, options))
                assert not said["changes"], said["changes"]
                sample = {key: said[key] for key in ("ttft_s", "tpot_s", "n_prompt", "n_generated")}
                entry["samples"].append(sample)
                entry["predicted"] = said["predicted"]
                note(f"{setting.name}, {name}, round {number}: {sample} {said['predicted']}")
    for entry in found.values():
        for key in ("ttft_s", "tpot_s"):
            entry[f"median_{key}"] = statistics.median(sample[key] for sample in entry["samples"])
            entry[f"{key[:4]}_error"] = entry["predicted"][key] / entry[f"median_{key}"] - 1
    return list(found.values())


def _command(lab: NetLab, model: Path, plan: Path, options: Any) -> list[str]:
    command = [OALLAMA, "cluster", "run", str(model), prompt_text(options.prompt), "--plan", str(plan), "--json"]
    command += ["--n-generate", str(options.generate), "--ssh-agent", str(lab.ssh_agent()), "--temperature", "0"]
    return [*command, "--threshold", "1000"]  # the plan as it is


def _without_qos(plan: ClusterPlan) -> ClusterPlan:
    problem = replace(plan.problem, settings=replace(plan.problem.settings, wq1=0.0, wq2=0.0, wq3=0.0))
    found = allocate(problem)
    return plan.allocated(plan.problem, found.layers, 0.0)


def _entry(setting: Setting, name: str, plan: ClusterPlan) -> dict[str, Any]:
    links = {f"{a} {b}": vars(link) for (a, b), link in plan.problem.network.links.items() if a == "client"}
    devices = {device.name: vars(device) for device in plan.problem.devices}
    described = {"setting": setting.name, "devices": setting.devices, "cables": [vars(c) for c in setting.cables]}
    measured = {"layers": plan.layers, "links": links, "rates": devices}
    return {**described, "plan": name, **measured, "samples": []}


def main() -> None:
    parser = arguments(__doc__, "pipeline")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--generate", type=int, default=32)
    parser.add_argument("--only", default="", help="names of settings, or their beginnings")
    options = parser.parse_args()
    chosen = [s for s in SETTINGS if not options.only or s.name.startswith(tuple(options.only.split(",")))]
    with tempfile.TemporaryDirectory(prefix="oallama-") as name:
        folder = Path(name)
        os.environ["XDG_CACHE_HOME"] = str(folder / "cache")  # times of this hour, not of a cached one
        model = options.model or paper_model(folder / "model.gguf")
        read = read_model(model, Settings(n_ctx=CTX))
        layers = sum(t.nbytes for t in read.graph.tensors if t.layer is not None) + read.kv_bytes * read.graph.n_layer
        every = (line for s in chosen for line in measure(s, model, layers, read.compute_bytes, folder, options))
        record(every, options.out, head=describe())


if __name__ == "__main__":
    main()
