"""Stay on one host or spread: what `oallama cluster plan` chooses on emulated hosts, against every way it could take.

python bench/spread.py [--model FILE.gguf] [--rounds 5] [--only REGEX] [--out FILE]
python bench/spread.py --table FILE      # of recorded cells, for docs/cluster.md

Hosts are network namespaces (oallama.netlab; root) with one CPU each; more hosts than CPUs share them. For every cell
`cluster plan` measures and chooses once. Then each way that it found possible runs the request, all in turn in each
round. Several requests at once are sent to a server, which is started anew for each way and round. Without --model:
the paper's LLaMA-3B shape (hidden 3200, 32 heads, feed-forward 8640) with 6 of 26 layers, Q8_0.
Writes the machine, then one JSON line per cell and way with every sample.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from subprocess import DEVNULL
from typing import Any

from cluster import OALLAMA, answer, paper_model, prompt_text
from oallama.bench.machine import describe
from oallama.bench.script import arguments, note, record
from oallama.cluster.allocation.cluster_plan import ClusterPlan
from oallama.cluster.pipeline.measure import read_model
from oallama.cluster.spread.choose import plan_of
from oallama.data.workload import Workload
from oallama.engine.load_settings import Settings
from oallama.netlab import Conditions, NetLab

LEAST_CTX = 1024
PORT = 8080


@dataclass(frozen=True)
class Cell:
    """memory: of each host as a share of what the whole model takes, the client's first. cables: of the others."""

    name: str
    memory: tuple[float, ...]
    cables: tuple[Conditions, ...]
    request: Workload

    @property
    def n_ctx(self) -> int:
        """Of all sequences; each may have as much."""
        return max(LEAST_CTX, self.request.n_parallel * (self.request.n_prompt + 256))


def cells() -> Iterator[Cell]:
    near, slow = Conditions(1e9, 0.1e-3), Conditions(1e9, 2e-3)
    fast, far = Conditions(1e10, 0.1e-3), Conditions(1e8, 20e-3)
    for n_prompt in (64, 512, 2048):
        request = Workload(n_prompt, 32)
        for room, memory in (("each holds it", (1.3, 1.3)), ("three quarters each", (0.75, 0.75))):
            for link, cable in (("10 Gbit 0.1 ms", fast), ("1 Gbit 0.1 ms", near), ("1 Gbit 2 ms", slow)):
                yield Cell(f"{n_prompt} tokens, {room}, {link}", memory, (cable,), request)
        yield Cell(f"{n_prompt} tokens, three quarters each, 100 Mbit 20 ms", (0.75, 0.75), (far,), request)
        yield Cell(f"{n_prompt} tokens, third far away", (0.75, 0.75, 0.75), (near, far), request)
    for n_parallel in (8, 32):
        request = Workload(64, 32, n_parallel=n_parallel)
        for room, memory in (("each holds it", (1.3, 1.3)), ("three quarters each", (0.75, 0.75))):
            for link, cable in (("10 Gbit 0.1 ms", fast), ("1 Gbit 2 ms", slow)):
                yield Cell(f"{n_parallel} requests of 64 tokens, {room}, {link}", memory, (cable,), request)


def measure(cell: Cell, model: Path, folder: Path, rounds: int) -> list[dict[str, Any]]:
    """One entry per way."""
    read = read_model(model, Settings(n_ctx=cell.n_ctx))
    nbytes, compute = read.graph.weights_bytes + read.kv_bytes * read.graph.n_layer, read.compute_bytes
    n_hosts = len(cell.memory)
    cables: dict[Any, Conditions] = {0: Conditions(rate_bit=1e10)}
    for host, cable in enumerate(cell.cables, 1):
        cables |= {host: cable, (0, host): cable, (host, 0): cable}
    n_cpus = os.cpu_count() or 1
    with NetLab(n_hosts, cables, [str(host % n_cpus) for host in range(n_hosts)]) as lab:
        devices, file = folder / "devices.toml", folder / "plan.json"
        sizes = [int(share * nbytes) + compute for share in cell.memory]
        devices.write_text(
            f"[client]\nmemory = {sizes[0]}\n"
            + "".join(
                f'[[device]]\nname = "h{host}"\nhost = "h{host}"\naddress = "{lab.address(host)}:50052"\n'
                f"memory = {sizes[host]}\n"
                for host in range(1, n_hosts)
            )
        )
        command = [OALLAMA, "cluster", "plan", str(model), "--devices", str(devices), "-o", str(file), "--json"]
        command += ["--ctx", str(cell.n_ctx), "--n-prompt", str(cell.request.n_prompt)]
        command += ["--n-generate", str(cell.request.n_generate), "--network", lab.network]
        command += ["--parallel", str(cell.request.n_parallel)]
        answer(lab, [*command, "--ssh-agent", str(lab.ssh_agent())])
        plan = ClusterPlan.load(file)
        assert plan.chosen is not None
        ways = [c for c in plan.candidates if c.predicted_s(cell.request) is not None]
        found = {c.name: _entry(cell, plan, c) for c in ways}
        for number in range(rounds):
            for way in ways:
                plan_of(plan, way).save(file)
                sample = _sample(lab, model, file, cell.request)
                found[way.name]["samples"].append(sample)
                note(f"{cell.name}, round {number}, {way.name}: {sample} ({way.ttft_s:.3f}, {way.tpot_s:.4f})")
    _compare(cell, list(found.values()))
    return list(found.values())


def _compare(cell: Cell, entries: list[dict[str, Any]]) -> None:
    """Medians, errors of the predictions, and the chosen way against the best one."""
    for entry in entries:
        for key in ("ttft_s", "tpot_s"):
            entry[f"median_{key}"] = statistics.median(sample[key] for sample in entry["samples"])
        entry["request_s"] = _seconds(cell, entry["median_ttft_s"], entry["median_tpot_s"])
        predicted = _seconds(cell, entry["predicted"]["ttft_s"], entry["predicted"]["tpot_s"])
        entry["error"] = predicted / entry["request_s"] - 1
    best = min(entry["request_s"] for entry in entries)
    for entry in entries:
        entry["against_best"] = best / entry["request_s"]
        if entry["chosen"]:
            note(f"{cell.name}: {entry['way']} chosen, {entry['against_best']:.3f} of the best")


def _seconds(cell: Cell, ttft_s: float, tpot_s: float) -> float:
    return ttft_s + (cell.request.n_generate - 1) * tpot_s


def _sample(lab: NetLab, model: Path, plan: Path, request: Workload) -> dict[str, Any]:
    """TTFT and TPOT of the request by the plan as it is: one prompt is completed, several are sent to a server."""
    command = [OALLAMA, "cluster", "run", str(model), "--plan", str(plan), "--ssh-agent", str(lab.ssh_agent())]
    command += ["--threshold", "1000"]
    if request.n_parallel > 1:
        with lab.popen(0, [*command, "--serve", "--port", str(PORT)], stdout=DEVNULL, stderr=DEVNULL) as server:
            try:
                sizes = map(str, (request.n_parallel, request.n_prompt, request.n_generate))
                program = str(Path(__file__).with_name("serve_once.py"))
                return answer(lab, [sys.executable, program, f"http://127.0.0.1:{PORT}", *sizes])
            finally:
                server.terminate()
    command += [prompt_text(request.n_prompt), "--n-generate", str(request.n_generate), "--temperature", "0", "--json"]
    said = answer(lab, command)
    return {key: said[key] for key in ("ttft_s", "tpot_s", "n_prompt", "n_generated")}


def _entry(cell: Cell, plan: ClusterPlan, way: Any) -> dict[str, Any]:
    links = {f"{a} {b}": vars(link) for (a, b), link in plan.problem.network.links.items() if a == "client"}
    described = {"cell": cell.name, "memory": cell.memory, "cables": [vars(cable) for cable in cell.cables]}
    described |= {"request": asdict(cell.request), "links": links}
    described |= {"way": way.name, "kind": way.way, "layers": way.layers, "ranks": way.ranks and asdict(way.ranks)}
    described |= {"not_possible": {c.name: c.why_not for c in plan.candidates if c.why_not}}
    return {
        **described,
        "chosen": way.name == plan.chosen.name,
        "predicted": {"ttft_s": way.ttft_s, "tpot_s": way.tpot_s},
        "samples": [],
    }


def table(path: Path) -> Iterator[str]:
    """One row per cell: seconds of the request by each way (measured, predicted), what was chosen, against the best."""
    cells_of: dict[str, list[dict[str, Any]]] = {}
    for line in (json.loads(text) for text in path.read_text().splitlines()):
        if "cell" in line:
            cells_of.setdefault(line["cell"], []).append(line)
    yield "| request, hosts, link | this host | pipeline | two parts | by memory | ranks | chosen | against the best |"
    yield "|---|--:|--:|--:|--:|--:|---|--:|"
    for name, ways in cells_of.items():
        columns = [
            next((way for way in ways if way["kind"] == "here"), None),
            next((way for way in ways if way["way"].startswith("pipeline")), None),
            next((way for way in ways if "two parts" in way["way"]), None),
            next((way for way in ways if "by memory" in way["way"]), None),
            min((way for way in ways if way["kind"] == "ranks"), key=lambda way: way["request_s"], default=None),
        ]
        (chosen,) = (way for way in ways if way["chosen"])
        shown = [f"{way['request_s']:.2f} s, {way['error']:+.0%}" if way else "-" for way in columns]
        kind = "two parts" if "two parts" in chosen["way"] else chosen["kind"].replace("here", "this host")
        yield f"| {name} | {' | '.join(shown)} | {kind} | {chosen['against_best']:.2f}x |"


def main() -> None:
    parser = arguments(__doc__, "spread")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--layers", type=int, default=6, help="of the model that is made")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="a regular expression that names of cells hold")
    parser.add_argument("--table", type=Path, help="print the table of a file of results")
    options = parser.parse_args()
    if options.table:
        print("\n".join(table(options.table)))
        return
    chosen = [cell for cell in cells() if re.search(options.only, cell.name)]
    with tempfile.TemporaryDirectory(prefix="oallama-") as name:
        folder = Path(name)
        os.environ["XDG_CACHE_HOME"] = str(folder / "cache")  # times of this hour, not of a cached one
        model = options.model or paper_model(folder / "model.gguf", options.layers)
        every = (line for cell in chosen for line in measure(cell, model, folder, options.rounds))
        record(every, options.out, head=describe())


if __name__ == "__main__":
    main()
