"""How many requests a hot model serves beside a cold one within an objective, in the same memory: with guests, without.

python bench/capacity.py [--out FILE.jsonl] [--seeds 3] [--requests 200] [--ways dedicated-2,guests] [--unplanned]

Two models behind one router, a core and a thread each. KV memory of the hot one holds --home of the longest requests,
that of the cold one --guests more. It is one cache for all slots, so that short requests leave room for others.
  dedicated-N  the hot model has N slots in its own KV memory; the cold one has all of its own for itself
  guests       --home slots in its own KV memory, and --guests sequences of the hot one in what the cold one lends
  llama.cpp-N  as dedicated-N, by the unpatched llama-server (ninja -C build/baseline llama-server)
The two models are loaded by `auto`'s plans for the CPU, unless --unplanned; llama.cpp-N knows none.

For each seed and way the highest rate of the hot model is searched at which 90 % of the requests of either model meet
their objective: it is doubled or halved, and then bisected until two rates are 1.1x apart. The cold model's rate stays.
Each rate has new servers, and lasts until --requests of the hot model are due. The generator is that of `oallama bench
serve`: Poisson arrivals, BurstGPT's lengths (575/340) times --scale; a seed's arrivals and lengths are the same for all
ways. One JSON line per rate; --table FILE.jsonl prints a recorded file.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from oallama.base.children import die_with_parent
from oallama.base.environment import MODEL_ENVIRONMENTS
from oallama.base.ports import free_port
from oallama.bench import find_baseline_lib
from oallama.bench.load import Load, Slo, Target, drive, highest, parse_lengths, reach, summary_line
from oallama.bench.load.lengths import LONGEST
from oallama.bench.machine import describe
from oallama.bench.script import arguments, note, read, record, words
from oallama.bench.stats import Ratio, speedup
from oallama.data.plan import PlacementPlan
from oallama.engine import runtime
from oallama.engine.load_settings import Settings
from oallama.modelmaker import SHAPES, make_model
from oallama.serving.serve_limits import Limits
from oallama.serving.serving import Served, environments, preset

WAYS = ["dedicated-2", "dedicated-4", "dedicated-6", "guests"]
GUESTS, UNPATCHED = "guests", "llama.cpp"
HOT, COLD = "hot", "cold"
CORES = {HOT: 0, COLD: 1}
ATTAINMENT = 0.9
DEADLINE_S = 1.0  # a graph of the cold model may take longer than usual
BLOCK = 64  # tokens of guests' KV memory
PRECISION = 1.1  # between a rate that meets the objective and one that does not
OALLAMA = Path(sys.executable).parent / "oallama"


def main() -> None:
    parser = arguments(__doc__, "capacity")
    parser.add_argument("--ways", type=words, default=WAYS, help="default: %(default)s")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=200, help="of the hot model at each rate")
    parser.add_argument("--rate", type=float, default=1.0, help="of the hot model, where the search begins")
    parser.add_argument("--cold-rate", type=float, default=0.5, help="of the cold model; the same in all")
    parser.add_argument("--runs", type=int, default=8, help="most rates of a search")
    parser.add_argument("--warmup", type=float, default=5.0)
    parser.add_argument("--drain", type=float, default=10.0, help="most seconds to wait for a rate's last answers")
    parser.add_argument("--scale", type=float, default=0.25, help="of BurstGPT's lengths")
    parser.add_argument("--type", default="Q8_0", help="of both models' weights")
    parser.add_argument("--layers", type=int, default=6, help="of both models; fewer are more requests a minute")
    parser.add_argument("--home", type=int, default=2, help="longest requests that the hot model's KV memory holds")
    parser.add_argument("--guests", type=int, default=4)
    parser.add_argument("--slo-ttft", type=float, default=3.0)
    parser.add_argument("--slo-tpot", type=float, default=0.1)
    parser.add_argument("--unplanned", action="store_true")
    parser.add_argument("--table", type=Path)
    options = parser.parse_args()
    if options.table:
        print(table(read(options.table)))
        return
    stated = {name: value for name, value in vars(options).items() if name not in ("out", "table")}
    print(table(record(searches(options), options.out, head=describe() | {"options": stated}, quiet=True)))


@dataclass(frozen=True)
class Model:
    path: Path
    plan: PlacementPlan | None


def searches(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        made = {"shape": "small", "file_type": options.type, "overrides": {"n_layer": options.layers}}
        models = {}
        for which in CORES:
            path = make_model(folder / f"{which}.gguf", **made)
            models[which] = Model(path, None if options.unplanned else planned(path, n_seq(options) * options.home))
        for seed in range(options.seeds):
            for way in options.ways:
                yield from search(way, seed, models, options)


def planned(path: Path, n_ctx: int) -> PlacementPlan:
    """`auto`'s plan for the CPU and one thread."""
    plan = path.with_suffix(".json")
    command = [OALLAMA, "plan", path, "--ctx", n_ctx, "--threads", 1, "--device", "CPU", "-o", plan]
    subprocess.run([*map(str, command)], check=True, stdout=subprocess.DEVNULL)
    return PlacementPlan.load(plan)


def n_seq(options: argparse.Namespace) -> int:
    """Tokens of the longest request, in whole blocks."""
    return -(-int(LONGEST * options.scale + 1) // BLOCK) * BLOCK


def search(way: str, seed: int, models: dict[str, Model], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A line for each rate that was tried, the last one with what was found."""
    lines: list[dict[str, Any]] = []

    def meets(factor: float) -> bool:
        rate = options.rate * factor
        found = measure(way, rate, seed, models, options)
        met = min(of["attainment"] for of in found["models"]) >= ATTAINMENT
        lines.append({"seed": seed, "way": way, "hot_rate": round(rate, 4), "met": met, **found})
        note(f"seed {seed} {way:12} {rate:6.2f}/s {'met' if met else 'missed'}: {shown(found['models'])}")
        return met

    good, bad = (factor and round(options.rate * factor, 4) for factor in highest(meets, options.runs, PRECISION))
    lines.append({"seed": seed, "way": way, "highest_met": good, "lowest_missed": bad})
    yield from lines


def measure(way: str, rate: float, seed: int, models: dict[str, Model], options: argparse.Namespace) -> dict[str, Any]:
    """One rate: servers, load, and what a run of the load generator adds up to."""
    load = os.getloadavg()[0]
    with servers(way, models, options) as (url, log, pid):
        service = reach(url, [HOT, COLD])
        pin(pid)
        run = drive(
            service,
            Load(
                (Target(HOT, rate), Target(COLD, options.cold_rate)),
                parse_lengths("burstgpt", options.scale),
                options.requests / rate,
                options.warmup,
                options.drain,
                seed=seed,
            ),
        )
        lost = log.read_text("utf-8", "replace").count("its guests are computed here")
    if run.end != "planned":
        raise SystemExit(f"{way} at {rate:g}/s: {run.end}")
    return {**summary_line(run, Slo(options.slo_ttft, options.slo_tpot)), "lost": lost, "load_average": load}


@contextmanager
def servers(way: str, models: dict[str, Model], options: argparse.Namespace) -> Iterator[tuple[str, Path, int]]:
    """A router with both models; gives its address, its log and its process."""
    at_home, lent = options.home * n_seq(options), options.guests * n_seq(options)
    form, _, slots = way.partition("-")
    settings = Settings(n_ctx=at_home, n_seq_max=options.home, n_threads=1, flash_attn="on")
    hot, cold = (Served(model.path, settings, plan=model.plan) for model in models.values())
    if form == GUESTS:
        shape = SHAPES["llama"]["small"]
        nbytes = lent * options.layers * 2 * shape.n_head_kv * shape.head_dim * 2  # K and V, f16
        hot, cold = replace(hot, guests=options.guests), replace(cold, lend_nbytes=nbytes)
    else:
        hot = replace(hot, settings=replace(settings, n_seq_max=int(slots)))
        cold = replace(cold, settings=replace(settings, n_ctx=at_home + lent))
    program, variables = runtime.program("llama-server"), dict[str, str]()
    with tempfile.TemporaryDirectory() as folder:
        if form == UNPATCHED:
            program = find_baseline_lib() / "llama-server"
        else:
            variables = {MODEL_ENVIRONMENTS.name: environments(hot, [cold], DEADLINE_S, Limits(), folder)}
        (Path(folder) / "preset.ini").write_text(preset([hot, cold]))
        port, log = free_port(), Path(folder) / "log"
        command = [program, "--models-preset", Path(folder) / "preset.ini", "--port", str(port)]
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


def shown(models: Sequence[dict[str, Any]]) -> str:
    return "; ".join(
        f"{of['model']} {of['completed']}/{of['sent']} {of['requests_per_s']:.2f}/s {of['attainment']:.0%} in time, "
        + ", ".join(f"{key} {1e3 * of[f'{key}_s']['p50']:.0f}" for key in ("ttft", "tpot") if of[f"{key}_s"])
        for of in models
    )


def table(lines: Sequence[dict[str, Any]]) -> str:
    """Of each way: the highest rates by seed, and what its best measured rate gave."""
    found = [line for line in lines if "highest_met" in line]
    rates = [line for line in lines if "hot_rate" in line]
    ways = list(dict.fromkeys(line["way"] for line in found))
    rows = [f"{'':12} {'highest hot rates by seed':28} done/s most tok/s most  TPOT50 ITL99  cold TPOT50  lost"]
    for way in ways:
        mine = [line for line in rates if line["way"] == way]
        best = {line["seed"]: line["highest_met"] for line in found if line["way"] == way}
        at_best = [line for line in mine if line["hot_rate"] == best[line["seed"]]]
        hot, cold = ([of_model(line, name) for line in at_best] for name in CORES)
        numbers = ", ".join(f"{rate:.2f}" if rate else "none" for rate in best.values())
        peak, tokens = (
            max(of_model(line, HOT)[key] for line in mine) for key in ("requests_per_s", "tokens_out_per_s")
        )
        times = [median_ms(hot, "tpot_s", "p50"), median_ms(hot, "itl_s", "p99"), median_ms(cold, "tpot_s", "p50")]
        done = f"{peak:11.2f} {tokens:10.1f} {times[0]:7.0f} {times[1]:5.0f} {times[2]:12.0f}"
        rows.append(f"{way:12} {numbers:28} {done} {sum(line['lost'] for line in mine):5}")
    if gained := gain(lines):
        rows.append(f"guests: {gained.value:.2f}x ({gained.low:.2f} to {gained.high:.2f}) of the best without")
    return "\n".join(rows)


def gain(lines: Sequence[dict[str, Any]]) -> Ratio | None:
    """Of guests over the best of the others, by the highest rates of the seeds."""
    rates: dict[str, list[float]] = {}
    for line in lines:
        if "highest_met" in line:
            rates.setdefault(line["way"], []).append(line["highest_met"] or 0.0)
    others = [seeds for way, seeds in rates.items() if way != GUESTS and all(seeds)]
    if not others or not all(rates.get(GUESTS, [0.0])):
        return None
    best = max(others, key=statistics.median)
    return speedup([1 / rate for rate in best], [1 / rate for rate in rates[GUESTS]])


def of_model(line: dict[str, Any], name: str) -> dict[str, Any]:
    return next(of for of in line["models"] if of["model"] == name)


def median_ms(models: Sequence[dict[str, Any]], key: str, percentile: str) -> float:
    values = [1e3 * of[key][percentile] for of in models if of[key]]
    return statistics.median(values) if values else float("nan")


if __name__ == "__main__":
    main()
