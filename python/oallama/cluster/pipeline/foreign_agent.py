"""What the client asks of an RPC server without an agent: `python -m oallama.cluster.pipeline.foreign_agent HOST:PORT`.

It runs on the client's host, for one request at a time: such a server has one client at a time, and that is the model's
while it runs. Requests and answers are the agent's (agent.py).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from oallama.engine import device_list, native
from oallama.errors import OallamaError

from .agent import FREE_SHARE, answer_requests
from .link_probe import PAYLOAD, PING

LINK_S = 1.0  # of measuring one size of transfers


class ForeignAgent:
    """As Agent (agent.py), as far as an RPC server alone can answer."""

    def __init__(self, endpoint: str, progress: Callable[[float, float, str], None]) -> None:
        self._endpoint, self._progress = endpoint, progress

    def hello(self) -> dict[str, Any]:
        """The server's device. Raises OallamaError where it has more than one."""
        device = device_list.device(self._device())
        return {
            "machine": self._endpoint,
            "device": device.name,
            "description": device.description,
            "memory": device.memory_free,
            "offered": int(FREE_SHARE * device.memory_free),
            "threads": 0,
        }

    def profile(self, graph: str, device: str, threads: int, options: dict[str, Any]) -> dict[str, Any]:
        """Times of the model's operators there, by llama.cpp's kernels alone."""
        from oallama.planning import OperatorGraph
        from oallama.profiling.profiler import profile_machine
        from oallama.profiling.recorder import cache_dir

        name = self._device()
        found = profile_machine(
            OperatorGraph.from_json(graph),
            [name],
            alone=True,
            ours=False,
            cache=cache_dir() / "rpc" / self._endpoint,  # another server may have the same description
            progress=self._progress,
            **options,
        )
        times = {kind: [vars(entry) for entry in getattr(found, kind)] for kind in ("operators", "attention")}
        return {"name": name, "times": times, "software_s": found.switch_time(name) or 0.0}

    def link(self, message_bytes: int) -> dict[str, Any]:
        """The way there, by data that is read back: a round trip each. Jitter and loss are in these times."""
        sizes = sorted({PING, message_bytes, PAYLOAD})
        rows = native.core().link_bench(self._device(), sizes, LINK_S)
        seconds = {row["bytes"]: float(row["median_s"]) for row in rows if row["direction"] == "d2h"}
        latency = seconds[PING] / 2
        return {
            "latency_s": latency,
            "bandwidth": PAYLOAD / max(seconds[PAYLOAD] - seconds[PING], 1e-7),
            "message_bytes": message_bytes,
            "message_s": max(latency, seconds[message_bytes] - latency),
        }

    def stop(self) -> dict[str, Any]:
        """The server is not ours to end."""
        return {}

    def _device(self) -> str:
        names = device_list.add_rpc_server(self._endpoint)
        if len(names) != 1:
            raise OallamaError(
                f"the RPC server at {self._endpoint} has {len(names)} devices; start it with one of them"
            )
        return names[0]


def main() -> None:
    answer_requests(partial(ForeignAgent, sys.argv[1]))


if __name__ == "__main__":
    main()
