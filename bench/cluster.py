"""One model on two emulated hosts: tensor-parallel ranks by all-reduce algorithm, and llama.cpp's -sm tensor over RPC.

python bench/cluster.py [--model FILE.gguf] [--hosts 2] [--slots 4] [--rate 1gbit] [--delay 0.1ms] [--out FILE]
python bench/cluster.py --memory     # "auto" with resident weights and with a window of them: peak memory of each rank

Hosts are network namespaces (oallama.netlab; root). Every engine is started anew in each round, in turn, completes
the same prompt greedily and says its TTFT and TPOT. Without --model: the paper's LLaMA-3B shape (hidden 3200, 32 heads,
feed-forward 8640) with 6 of 26 layers, Q8_0. "rpc" is llama.cpp's tensor parallelism over one RPC server a rank, whose
all-reduce goes through the client. Writes the machine, then one JSON line per engine with every sample.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from oallama.bench.machine import describe
from oallama.bench.script import arguments, note, record
from oallama.engine import runtime
from oallama.modelmaker import make_model
from oallama.netlab import Conditions, NetLab
from oallama.netlab.conditions import parse_rate, parse_time

SHAPE = {"n_layer": 6, "n_embd": 3200, "n_ff": 8640, "n_head": 32, "n_head_kv": 32}
ALGORITHMS = ("auto", "star", "tree")
RPC = "rpc"
MINIMAL = "minimal"
SAMPLE_S = 0.02
PORT = 50100
OALLAMA = str(Path(sys.executable).parent / "oallama")


def command(lab: NetLab, engine: str, model: Path, hosts: Path, endpoints: list[str], options: Any) -> list[str]:
    """What runs in host 0 and prints a JSON object with ttft_s, tpot_s and text."""
    if engine == RPC:
        role = [sys.executable, __file__, "--rpc-client", ",".join(endpoints), "--model", str(model)]
        return [*role, "--prompt", str(options.prompt), "--generate", str(options.generate)]
    run = [OALLAMA, "cluster", "run", str(model), prompt_text(options.prompt), "--hosts", str(hosts), "--json"]
    run += ["--network", lab.network, "--ssh-agent", str(lab.ssh_agent()), "--ctx", "1024"]
    run += ["--memory", MINIMAL] if engine == MINIMAL else ["--allreduce", engine]
    equal = ",".join(["1"] * options.hosts * options.slots)
    return [*run, "--split", equal, "--temperature", "0", "--n-generate", str(options.generate)]


def prompt_text(n_tokens: int) -> str:
    """About so many tokens."""
    return " ".join(["the"] * (n_tokens - 1))


def answer(lab: NetLab, command: list[str]) -> dict[str, Any]:
    """The JSON object that a command prints in host 0; ends this program if the command failed."""
    done = lab.run(0, command, capture_output=True, text=True, timeout=1800)
    if done.returncode:
        raise SystemExit(f"{' '.join(command[:4])}: {done.stderr[-2000:]}")
    return dict(json.loads(done.stdout))


def paper_model(path: Path, n_layer: int = SHAPE["n_layer"]) -> Path:
    """The paper's LLaMA-3B, in Q8_0, with so many of its layers."""
    return make_model(path, arch="llama", shape="small", file_type="Q8_0", overrides={**SHAPE, "n_layer": n_layer})


def rpc_client(endpoints: list[str], model: Path, options: Any) -> None:
    """llama.cpp's -sm tensor over RPC servers, driven like a rank."""
    from oallama.cluster.ranks.rank import RankJob, rank_llama
    from oallama.engine import device_list
    from oallama.engine.runtime import quiet
    from oallama.loading.completion import complete

    quiet()
    names = [name for endpoint in endpoints for name in device_list.add_rpc_server(endpoint)]
    shares = tuple(1 / len(names) for _ in names)
    job = RankJob(str(model), shares, n_ctx=1024)
    llm = rank_llama(job, 1, names)
    clock, text = complete(llm, prompt_text(options.prompt), options.generate, 0.0, None, quiet=True)
    print(json.dumps({"ttft_s": clock.ttft_s, "tpot_s": clock.tpot_s, "text": text}))


def start_servers(lab: NetLab, options: Any) -> list[str]:
    """One RPC server per rank, of one thread; they live as long as the lab."""
    endpoints = []
    for host in range(options.hosts):
        for slot in range(options.slots):
            port = PORT + slot
            server = [str(runtime.program("ggml-rpc-server")), "--listen", lab.address(host), "-p", str(port)]
            lab.popen(host, [*server, "--device", "CPU", "--threads", "1"], stdout=subprocess.DEVNULL)
            endpoints.append(f"{lab.address(host)}:{port}")
    return endpoints


class MemorySamples:
    """Samples the resident bytes of all ranks within a block."""

    def __enter__(self) -> MemorySamples:
        self._found: dict[int, list[tuple[float, int]]] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def peaks(self, last_s: float) -> list[int]:
        """Each rank's most resident bytes in its last so many seconds: while it answers, and not while it loads."""
        return sorted(max(size for at, size in found if at > found[-1][0] - last_s) for found in self._found.values())

    def _sample(self) -> None:
        while not self._stop.wait(SAMPLE_S):
            for folder in Path("/proc").iterdir():
                with suppress(OSError, ValueError, IndexError):
                    words = (folder / "cmdline").read_bytes().split(b"\0")
                    if b"oallama.cluster.ranks.rank_process" in words and b"python" in words[0]:
                        resident = int((folder / "status").read_text().split("VmRSS:")[1].split()[0]) * 1024
                        self._found.setdefault(int(folder.name), []).append((time.monotonic(), resident))


def measure(model: Path, folder: Path, options: Any) -> list[dict[str, Any]]:
    """One entry per engine."""
    engines = ["auto", MINIMAL] if options.memory else [*ALGORITHMS, *([RPC] if options.rpc else [])]
    found: dict[str, dict[str, Any]] = {e: {"engine": e, "samples": [], "texts": set()} for e in engines}
    hosts = folder / "hosts.txt"
    hosts.write_text("".join(f"h{i} slots={options.slots}\n" for i in range(options.hosts)))
    conditions = Conditions(rate_bit=parse_rate(options.rate), delay_s=parse_time(options.delay))
    for number in range(options.rounds):
        for engine in engines:
            with NetLab(options.hosts, conditions) as lab:
                endpoints = start_servers(lab, options) if engine == RPC else []
                run = command(lab, engine, model, hosts, endpoints, options)
                with lab.traffic() as traffic, MemorySamples() as memory:
                    said = answer(lab, run)
            sample = {"round": number, "ttft_s": said["ttft_s"], "tpot_s": said["tpot_s"], "sent_bytes": traffic.sent}
            sample["peak_bytes"] = memory.peaks(said["ttft_s"] + (options.generate - 1) * said["tpot_s"])
            found[engine]["samples"].append(sample)
            found[engine]["texts"].add(said["text"])
            note(f"round {number} {engine:8} {sample}")
    texts = set.union(*(entry["texts"] for entry in found.values()))
    for entry in found.values():
        entry["same_text_as_all"] = len(texts) == 1
        del entry["texts"]
        for name in ("ttft_s", "tpot_s"):
            entry[f"median_{name}"] = statistics.median(s[name] for s in entry["samples"])
    star = found.get("star")
    for entry in found.values() if star else ():
        entry["ttft_against_star"] = entry["median_ttft_s"] / star["median_ttft_s"] - 1
        entry["tokens_per_s_against_star"] = star["median_tpot_s"] / entry["median_tpot_s"] - 1
    return list(found.values())


def main() -> None:
    parser = arguments(__doc__, "cluster")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--layers", type=int, default=SHAPE["n_layer"], help="of the model that is made")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--slots", type=int, default=4, help="ranks of a host")
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--delay", default="0.1ms", help="one way")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=64, help="tokens")
    parser.add_argument("--generate", type=int, default=16, help="tokens")
    parser.add_argument("--memory", action="store_true", help="resident weights against a window of them")
    parser.add_argument("--no-rpc", dest="rpc", action="store_false")
    parser.add_argument("--rpc-client", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rpc_client:
        rpc_client(options.rpc_client.split(","), options.model, options)
        return
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="oallama-")))
        token = folder / "rpc.token"  # of the servers and their client
        token.touch(0o600)
        token.write_text(secrets.token_hex(32))
        os.environ["OALLAMA_RPC_TOKEN_FILE"] = str(token)
        model = options.model or paper_model(folder / "model.gguf", options.layers)
        setting = {k: v for k, v in vars(options).items() if k not in ("model", "out", "rpc_client")}
        lines = ({**setting, "model_nbytes": model.stat().st_size, **e} for e in measure(model, folder, options))
        record(lines, options.out, head=describe())


if __name__ == "__main__":
    main()
