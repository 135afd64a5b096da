"""How long ranks on two hosts wait for a message, with Open MPI's own rate of looking at its sockets and with ours.

python bench/rank_messages.py [--model FILE.gguf] [--rounds 10] [--out FILE]

Two emulated hosts (oallama.netlab; root) with a CPU each, 10 Gbit and 0.1 ms one way. In each round ranks are started
once each way, in turn, and add up one row of activations and 64 of them, as before a model is spread (preflight.py).
Writes the machine, then a JSON line for each way with the seconds of every start.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from cluster import answer
from oallama.bench.machine import describe
from oallama.bench.script import arguments, note, record
from oallama.cluster.ranks import launch, mpi
from oallama.modelmaker import make_model
from oallama.netlab import Conditions, NetLab

ROW_BYTES = 12800  # 3200 values
SIZES = (ROW_BYTES, 64 * ROW_BYTES)
WAYS = ("Open MPI's", "ours")
CABLE = Conditions(rate_bit=1e10, delay_s=0.1e-3)


def look(way: str, network: str, agent: str, model: Path) -> None:
    """In host 0: start ranks and print the seconds of their sums."""
    if way == WAYS[0]:
        mpi._LOOKS = ()
    hosts = (mpi.Host("localhost", 1), mpi.Host("h1", 1))
    reports = launch.look(launch.RankGroup(hosts, network=network, ssh_agent=agent), model, SIZES)
    print(json.dumps({"sums": reports[0]["sums"]}))


def measure(model: Path, rounds: int) -> list[dict[str, Any]]:
    """One entry per way."""
    found: dict[str, list[list[float]]] = {way: [] for way in WAYS}
    with NetLab(2, CABLE, ["0", "1"]) as lab:
        for number in range(rounds):
            for way in WAYS:
                command = [sys.executable, __file__, "--look", way, "--network", lab.network]
                said = answer(lab, [*command, "--agent", str(lab.ssh_agent()), "--model", str(model)])
                found[way].append([seconds for _, seconds in said["sums"]])
                note(f"round {number}, {way}: {found[way][-1]}")
    return [
        {
            "way": way,
            "bytes": SIZES,
            "seconds": starts,
            "median_s": [statistics.median(each) for each in zip(*starts, strict=True)],
            "slow_starts": sum(start[0] > 2e-3 for start in starts),
        }
        for way, starts in found.items()
    ]


def main() -> None:
    parser = arguments(__doc__, "rank-messages")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--rounds", type=int, default=10)
    for name in ("--look", "--network", "--agent"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.look:
        look(options.look, options.network, options.agent, options.model)
        return
    with tempfile.TemporaryDirectory(prefix="oallama-") as folder:
        model = options.model or make_model(Path(folder) / "tiny.gguf", arch="llama", shape="tiny", file_type="Q8_0")
        record(measure(model, options.rounds), options.out, head=describe())


if __name__ == "__main__":
    main()
