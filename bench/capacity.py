"""How many requests a hot model serves beside a cold one, in the same memory: with guests and without.

python bench/capacity.py [-o FILE.jsonl] [--quick] [--rates 0.3,0.6,0.9,1.2] [--duration 60]

Three ways on the same cores, interleaved, each cell with servers started anew and the same arrivals and lengths:
  dedicated  two llama-servers behind llama.cpp's router, a core and a thread each; the hot one has KV memory for
             --home sequences, further requests wait
  shared     the same, but either model uses both cores with a thread on each: llama.cpp's router and its default; where
             both models compute, four threads wait actively on two cores (with a thread each this is `dedicated`)
  guests     as dedicated, and --guests more sequences of the hot model in KV memory that the cold one lends
A process has the same bytes of KV cache in all three: with guests the cold model's own is smaller by what it lends.
The generator is that of `oallama bench serve`: Poisson arrivals, BurstGPT's lengths (575/340) times --scale. One JSON
line per cell; --table FILE.jsonl prints a recorded file.
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from oallama.base.children import die_with_parent
from oallama.base.environment import MODEL_ENVIRONMENTS
from oallama.bench.load import Load, Slo, Target, drive, parse_lengths, reach, summary_line
from oallama.bench.load.lengths import LONGEST
from oallama.bench.machine import describe
from oallama.bench.script import arguments, read, record, words
from oallama.engine import runtime
from oallama.engine.load_settings import Settings
from oallama.engine.rpc import free_port
from oallama.modelmaker import SHAPES, make_model
from oallama.serving.serve_limits import Limits
from oallama.serving.serving import Served, environments, preset

WAYS = ("dedicated", "shared", "guests")
HOT, COLD = "hot", "cold"
CORES = {HOT: 0, COLD: 1}
ATTAINMENT = 0.9
DEADLINE_S = 1.0  # a graph of the cold model may take longer than usual
BLOCK = 64  # tokens of guests' KV memory
HEAD = "hot/s way        model done/sent  req/s  tok/s TTFT50      95  TPOT50      95   met"


def main() -> None:
    parser = arguments(__doc__, "capacity")
    parser.add_argument("--rates", default="0.7,1.0,1.3,1.6", help="requests per second of the hot model: %(default)s")
    parser.add_argument("--cold-rate", type=float, default=0.2)
    parser.add_argument("--duration", type=float, default=60.0, help="measured seconds of a cell")
    parser.add_argument("--warmup", type=float, default=10.0)
    parser.add_argument("--drain", type=float, default=20.0, help="most seconds to wait for a cell's last answers")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--scale", type=float, default=0.25, help="of BurstGPT's lengths")
    parser.add_argument("--layers", type=int, default=6, help="of both models; fewer are more requests a minute")
    parser.add_argument("--home", type=int, default=2, help="sequences that fit into a model's own KV memory")
    parser.add_argument("--guests", type=int, default=4)
    parser.add_argument("--slo-ttft", type=float, default=3.0)
    parser.add_argument("--slo-tpot", type=float, default=0.1)
    parser.add_argument("--ways", type=words, default=WAYS)
    parser.add_argument("--quick", action="store_true", help="two rates, 12 s each, shorter requests")
    parser.add_argument("--table", type=Path)
    options = parser.parse_args()
    if options.table:
        print(table(read(options.table)))
        return
    if options.quick:
        options.rates, options.cold_rate, options.scale = "1.5,3", 0.5, 0.1
        options.duration, options.warmup, options.drain = 12.0, 3.0, 10.0
    stated = {name: value for name, value in vars(options).items() if name not in ("out", "table")}
    print(table(record(cells(options), options.out, head=describe() | {"options": stated}, quiet=True)))


def cells(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        # F16: a step is mostly the reading of weights, as on GPUs, so that larger batches are worth something.
        made = {"shape": "small", "file_type": "F16", "overrides": {"n_layer": options.layers}}
        models = {name: make_model(Path(folder) / f"{name}.gguf", **made) for name in CORES}
        for number in range(options.rounds):
            for rate in map(float, options.rates.split(",")):
                for way in options.ways:
                    cell = {"round": number, "way": way, "hot_rate": rate, "load_average": os.getloadavg()[0]}
                    cell |= measure(way, rate, number, models, options)
                    print(*rows([cell]), sep="\n", flush=True)
                    yield cell


def measure(way: str, rate: float, seed: int, models: dict[str, Path], options: argparse.Namespace) -> dict[str, Any]:
    """One cell: servers, load, and what a run of the load generator adds up to."""
    with servers(way, models, options) as (url, log, pid):
        service = reach(url, [HOT, COLD])
        if way != "shared":
            pin(pid)
        load = Load(
            (Target(HOT, rate), Target(COLD, options.cold_rate)),
            parse_lengths("burstgpt", options.scale),
            options.duration,
            options.warmup,
            options.drain,
            seed=seed,
        )
        run = drive(service, load)
        lost = log.read_text("utf-8", "replace").count("its guests are computed here")
    if run.end != "planned":
        raise SystemExit(f"{way} at {rate:g}/s: {run.end}")
    return {**summary_line(run, Slo(options.slo_ttft, options.slo_tpot)), "lost": lost}


@contextmanager
def servers(way: str, models: dict[str, Path], options: argparse.Namespace) -> Iterator[tuple[str, Path, int]]:
    """llama.cpp's router with both models; gives its address, its log and its process."""
    n_seq = -(-int(LONGEST * options.scale + 1) // BLOCK) * BLOCK  # tokens of the longest request
    at_home, lent = options.home * n_seq, options.guests * n_seq
    shape = SHAPES["llama"]["small"]
    lent_nbytes = lent * options.layers * 2 * shape.n_head_kv * shape.head_dim * 2  # K and V, f16
    threads = len(CORES) if way == "shared" else 1
    settings = Settings(n_ctx=at_home, n_seq_max=options.home, n_threads=threads, flash_attn="on")
    if way == "guests":
        hot = Served(models[HOT], settings, guests=options.guests)
        cold = Served(models[COLD], settings, lend_nbytes=lent_nbytes)
    else:
        hot = Served(models[HOT], settings)
        cold = Served(models[COLD], replace(settings, n_ctx=at_home + lent))
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "preset.ini").write_text(preset([hot, cold]))
        port, log = free_port(), Path(folder) / "log"
        command = [runtime.program("llama-server"), "--models-preset", Path(folder) / "preset.ini", "--port", str(port)]
        variables = {MODEL_ENVIRONMENTS.name: environments(hot, [cold], DEADLINE_S, Limits(), folder)}
        with log.open("wb") as output:
            process = subprocess.Popen(
                list(map(str, command)),
                env=os.environ | variables,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        try:
            until_up(port, process, log)
            yield f"http://127.0.0.1:{port}", log, process.pid
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def until_up(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < end:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.05)
    raise SystemExit(f"the router does not come up:\n{log.read_text('utf-8', 'replace')[-2000:]}")


def pin(router: int) -> None:
    """Put every thread of the router's models on the model's core; threads that they start later stay there."""
    for name, core in CORES.items():
        (pid,) = [pid for pid in children(router) if f"--alias\0{name}\0" in Path(f"/proc/{pid}/cmdline").read_text()]
        for thread in Path(f"/proc/{pid}/task").iterdir():
            os.sched_setaffinity(int(thread.name), {core})


def children(parent: int) -> list[int]:
    lists = [path.read_text().split() for path in Path(f"/proc/{parent}/task").glob("*/children")]
    return [int(pid) for found in lists for pid in found]


def table(lines: list[dict[str, Any]]) -> str:
    """All cells, medians over their rounds, and to which rate of the hot model each way keeps the objective."""
    cells, options = [line for line in lines if "way" in line], lines[0]["options"]
    ways = dict.fromkeys(cell["way"] for cell in cells)
    limits = {way: limit([cell for cell in cells if cell["way"] == way]) for way in ways}
    objective = f"TTFT {options['slo_ttft']:g} s and TPOT {options['slo_tpot']:g} s"
    found = [
        HEAD,
        *rows(cells),
        "",
        f"times in ms; {ATTAINMENT:.0%} of the hot model's requests meet {objective} up to",
    ]
    for way, (rate, sign) in limits.items():
        ratio = f", {rate / limits['dedicated'][0]:.2f}x" if way != "dedicated" and "dedicated" in limits else ""
        found.append(f"  {way:10} {sign}{rate:.2f}/s{ratio}")
    loads = [cell["load_average"] for cell in cells]
    found.append(f"receivers of guests failed {sum(cell['lost'] for cell in cells)} times")
    found.append(f"load average before a cell, that of the cell before included: {min(loads):.1f} to {max(loads):.1f}")
    return "\n".join(found)


def rows(cells: list[dict[str, Any]]) -> Iterator[str]:
    """Two rows, one a model, for every rate and way."""
    for rate, way in dict.fromkeys((cell["hot_rate"], cell["way"]) for cell in cells):
        of_cell = [of for cell in cells if (cell["hot_rate"], cell["way"]) == (rate, way) for of in cell["models"]]
        for name in CORES:
            mine = [of for of in of_cell if of["model"] == name]
            if not mine:
                continue
            count = f"{sum(of['completed'] for of in mine)}/{sum(of['sent'] for of in mine)}"
            flows = [median([of[key] for of in mine]) for key in ("requests_per_s", "tokens_out_per_s")]
            keys = [(latency, p) for latency in ("ttft_s", "tpot_s") for p in ("p50", "p95")]
            times = [1e3 * median([of[latency][p] for of in mine if of[latency]]) for latency, p in keys]
            row = [f"{rate:5.2f} {way:10}" if name == HOT else " " * 16, f"{name:5} {count:>9}"]
            row += [f"{flows[0]:6.2f} {flows[1]:6.1f}", *(f"{ms:7.0f}" for ms in times)]
            yield " ".join([*row, f"{median([of['attainment'] for of in mine]):5.0%}"])


def median(values: list[float]) -> float:
    return statistics.median(values) if values else float("nan")


def limit(cells: list[dict[str, Any]]) -> tuple[float, str]:
    """The hot rate at which ATTAINMENT is crossed, by straight lines between the measured ones; "<", ">": outside."""
    met: dict[float, list[float]] = {}
    for cell in cells:
        met.setdefault(cell["hot_rate"], []).extend(of["attainment"] for of in cell["models"] if of["model"] == HOT)
    points = [(rate, median(values)) for rate, values in sorted(met.items())]
    if points[0][1] < ATTAINMENT:
        return points[0][0], "<"
    for (low, above), (high, below) in itertools.pairwise(points):
        if below < ATTAINMENT:
            return low + (high - low) * (above - ATTAINMENT) / (above - below), ""
    return points[-1][0], ">"


if __name__ == "__main__":
    main()
