"""The paper's ablation on a CPU: a hot model's guests in a cold model's process, one core each.

python bench/weave.py [-o FILE.jsonl] [--rounds 5] [--steps 40] [--modes alone,polls] [--prompt 256]

Modes, interleaved in every round, each with both models started anew:
  alone      the cold model, no receiver, no hot model
  polls      the cold model with a receiver that nobody uses: what looking for tasks costs
  home       both models; the hot one's sequences all at home
  graphs     guests; the cold model's threads compute their attention at the end of a graph (control by requests)
  operators  guests; at the end of every operator
  parts      guests; also inside of matrix multiplications
  home-ours  as home; the hot model's attention is by our kernels
  ours       as parts; the same, its guests' as well
One JSON line per mode and round: seconds of the steps (a token of every sequence) of either model while the hot one
decodes, and how long the hot one waited for results; and seconds of steps in which a guest joins with a prompt, while
all others decode a token. --table FILE.jsonl prints a recorded file.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from oallama.bench import maps
from oallama.bench.machine import describe
from oallama.bench.script import arguments, read, record, words
from oallama.engine.backend_map import backend_map
from oallama.engine.load_settings import Settings
from oallama.loading import autoplan
from oallama.modelmaker import make_model
from oallama.weave import Receiver
from oallama.weave.sequences import Sequences

MODES = ("alone", "polls", "home", "graphs", "operators", "parts", "home-ours", "ours")
OURS = ("home-ours", "ours")
HOT_CORE, COLD_CORE = 0, 1
QUOTA = 1 << 30
JOINS = 6


def main() -> None:
    parser = arguments(__doc__, "weave")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40, help="of the hot model")
    parser.add_argument("--hot-sequences", type=int, default=8)
    parser.add_argument("--guests", type=int, default=4, help="of them")
    parser.add_argument("--cold-sequences", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=256, help="tokens of each sequence when decoding begins")
    parser.add_argument("--deadline", type=float, default=1.0, help="seconds; a graph may take longer than usual")
    parser.add_argument("--model", type=Path, help="of both (default: llama small, Q8_0)")
    parser.add_argument("--modes", type=words, default=MODES, help="default: all")
    parser.add_argument("--table", type=Path)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.table:
        print(table(read(options.table)))
        return
    if options.worker:
        side, mode, path = options.worker.split(":")
        (hot if side == "hot" else cold)(mode, path, options)
        return
    print(table(record(measured(options), options.out, head=describe(), quiet=True)))


def measured(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        if options.model is None:
            options.model = make_model(Path(folder) / "model.gguf", shape="small", file_type="Q8_0")
        for number in range(options.rounds):
            for mode in options.modes:
                line = {"round": number, "mode": mode, **settings(options), **measure(mode, options)}
                print(number, mode, summary(line), flush=True)
                yield line


def settings(options: argparse.Namespace) -> dict[str, Any]:
    names = ("steps", "hot_sequences", "guests", "cold_sequences", "deadline", "prompt")
    return {name: getattr(options, name) for name in names}


def measure(mode: str, options: argparse.Namespace) -> dict[str, Any]:
    """Steps of both models: (end, seconds) of the cold one's are cut to the time in which the hot one decoded."""
    path = f"/dev/shm/oallama-weave-bench-{os.getpid()}"
    with worker("cold", mode, path, COLD_CORE, options) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        if mode in ("alone", "polls"):
            begin = time.monotonic()
            time.sleep(3)
            found: dict[str, Any] = {"begin": begin, "end": time.monotonic(), "hot_s": [], "waited_s": 0.0}
        else:
            with worker("hot", mode, path, HOT_CORE, options) as other:
                out, _ = other.communicate(timeout=600)
            found = json.loads(out)
        out, _ = process.communicate("end\n", timeout=60)
    steps = json.loads(out)
    inside = [seconds for end, seconds in steps if found["begin"] < end - seconds and end < found["end"]]
    of_hot = {name: found.get(name, 0) for name in ("hot_s", "waited_s", "join_s", "join_waited_s", "lost")}
    return {**of_hot, "cold_s": inside}


def worker(side: str, mode: str, path: str, core: int, options: argparse.Namespace) -> subprocess.Popen[str]:
    command = ["taskset", "-c", str(core), sys.executable, __file__, "--worker", f"{side}:{mode}:{path}"]
    for name in ("steps", "hot_sequences", "guests", "cold_sequences", "deadline", "prompt", "model"):
        command += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def prompt(sequence: int, n: int) -> list[int]:
    return [300 + (sequence * 31 + i * 7) % 1000 for i in range(n)]


def cells(n_sequences: int, options: argparse.Namespace) -> int:
    """Of a cache in which sequences have room for their prompts and all steps, and for one that joins."""
    return max(8192, (n_sequences + 1) * (options.prompt + 512))


def our_attention(model: Path) -> str:
    """A backend map of the CPU."""
    graph = autoplan.read_graph(model, Settings(n_ctx=64))
    return maps.backend_map(graph, "CPU", lambda tensor: "CPU host") + "attention oallama\n"


def cold(mode: str, path: str, options: argparse.Namespace) -> None:
    """Decodes until told to end; prints (end, seconds) of every step."""
    n = options.cold_sequences
    with ExitStack() as stack:
        model = stack.enter_context(Sequences(options.model, n_seq=n, n_ctx=cells(n, options)))
        if mode not in ("alone", "home", "home-ours"):
            polls = "parts" if mode in ("polls", "ours") else mode
            receiver = stack.enter_context(Receiver(path, QUOTA, polls=polls))
            stack.enter_context(receiver.serving())
        steps = []
        numbers = range(n)
        fill(model, numbers, options.prompt)
        print("ready", flush=True)
        while not select.select([sys.stdin], [], [], 0)[0]:
            begin = time.monotonic()
            model.step({number: [500] for number in numbers})
            steps.append((time.monotonic(), time.monotonic() - begin))
            if model.lengths[0] >= options.prompt + 200:  # the context stays as long as it was
                for number in numbers:
                    model.remove(number, options.prompt)
        print(json.dumps(steps))


def hot(mode: str, path: str, options: argparse.Namespace) -> None:
    """Decodes its steps; prints their seconds."""
    channels = [] if mode.startswith("home") else [path]
    first = options.hot_sequences - options.guests
    n = options.hot_sequences
    sizes = {"n_seq": n, "n_ctx": cells(n, options), "n_ubatch": 512}
    with ExitStack() as stack:
        with backend_map(our_attention(options.model) if mode in OURS else None):
            made = Sequences(options.model, channels=channels, first_guest=first, deadline_s=options.deadline, **sizes)
        model = stack.enter_context(made)
        numbers = range(n)
        fill(model, numbers, options.prompt)
        before, begin, seconds = model.stats["waited_s"], time.monotonic(), []
        for _ in range(options.steps):
            started = time.monotonic()
            model.step({number: [500] for number in numbers})
            seconds.append(time.monotonic() - started)
        waited = model.stats["waited_s"]
        found = {"begin": begin, "end": time.monotonic(), "hot_s": seconds, "waited_s": waited - before}
        found |= {"join_s": joins(model, options), "join_waited_s": model.stats["waited_s"] - waited}
        joined = JOINS if options.guests else 0
        assert not channels or model.stats["n_guests"] == options.guests + joined
        print(json.dumps({**found, "lost": model.stats["n_lost"]}))


def joins(model: Sequences, options: argparse.Namespace) -> list[float]:
    """Seconds of steps in which the last sequence begins anew, and the others go on."""
    seconds, last = [], options.hot_sequences - 1
    for at in range(JOINS):
        model.remove(last)
        started = time.monotonic()
        model.step({**{number: [500] for number in range(last)}, last: prompt(last + at, options.prompt)})
        seconds.append(time.monotonic() - started)
        model.step({number: [500] for number in range(last + 1)})
    return seconds


def fill(model: Any, numbers: range, n: int) -> None:
    for number in numbers:
        model.step({number: prompt(number, n)})


def summary(line: dict[str, Any]) -> str:
    hot_s = statistics.median(line["hot_s"]) if line["hot_s"] else 0.0
    join_s = statistics.median(line["join_s"]) if line["join_s"] else 0.0
    cold_s = statistics.median(line["cold_s"])
    return f"hot {hot_s * 1e3:.1f} ms, join {join_s * 1e3:.1f} ms, cold {cold_s * 1e3:.1f} ms, lost {line['lost']}"


def table(lines: list[dict[str, Any]]) -> str:
    """Medians over the rounds of the medians over the steps, in ms."""
    rows = [f"{'mode':10} {'hot step':>9} {'of it waiting':>14} {'a join':>8} {'cold step':>10}"]
    for mode in MODES:
        of_mode = [line for line in lines if line.get("mode") == mode]
        if not of_mode:
            continue
        cold_s = statistics.median(statistics.median(line["cold_s"]) for line in of_mode)
        hot_text = waits = join = "-"
        if of_mode[0]["hot_s"]:
            hot_text = f"{statistics.median(statistics.median(line['hot_s']) for line in of_mode) * 1e3:.1f}"
            waits = f"{statistics.median(line['waited_s'] / len(line['hot_s']) for line in of_mode) * 1e3:.1f}"
            if all(line.get("join_s") for line in of_mode):
                join = f"{statistics.median(statistics.median(line['join_s']) for line in of_mode) * 1e3:.1f}"
        rows.append(f"{mode:10} {hot_text:>9} {waits:>14} {join:>8} {cold_s * 1e3:10.1f}")
    return "\n".join(rows)


if __name__ == "__main__":
    main()
