#!/usr/bin/env python3
"""The tables of numbers in README.md, made from bench/results: no number there is written by hand.

scripts/readme_numbers.py                      # prints them
scripts/readme_numbers.py [--write | --check]  # puts them into README.md; 1 when README.md has others
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import readme_gpu
from readme_experts import by_experts
from readme_lines import MACHINES, Lines, of_machine, read, span

from oallama.bench.attention_cells import table

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- numbers: scripts/readme_numbers.py --write -->", "<!-- end of numbers -->"
STOCK = ("layers", "fewer-layers", "fit", "cpu-moe", "cpu-ffn", "llama.cpp CPU")  # in bench/cells.py
WHEELS = {"CPU": "wheel", "CUDA": "cuda-wheel"}  # llama-cpp-python's


def latest(*files: Lines) -> Lines:
    """A line of each cell: the last one, where it was measured again."""
    of_cell = ("arch", "device", "budget", "depth", "n_threads")
    return [*{tuple(line[name] for name in of_cell): line for line in chain(*files)}.values()]


def ratio(line: dict[str, Any]) -> float:
    """How much faster the chosen plan of a cell is than the fastest of llama.cpp's own ways, its CPU alone included."""
    engines = line["engines"].items()
    rivals = [engine["request_s"] for name, engine in engines if own_name(name).removesuffix("-last") in STOCK]
    return float(min(rivals) / chosen(line)["request_s"])


def own_name(engine: str) -> str:  # without its form of attention: newer cells have every rival in both
    return engine.partition(" -fa ")[0]


def chosen(line: dict[str, Any]) -> dict[str, Any]:
    """What was measured of a cell's chosen plan."""
    return dict(line["engines"][line["same_as"].get(line["chosen"], line["chosen"])])


def errors(plans: Lines) -> str:
    """Median and 90th percentile of the error of predicted times, of plans that were measured."""
    texts = []
    for key in ("ttft_s", "tpot_s"):
        found = sorted(abs(plan["predicted"][key] / plan[key] - 1) for plan in plans if plan.get("predicted"))
        p90 = found[min(len(found) - 1, int(0.9 * len(found)))]
        texts.append(f"{key[:4].upper()} {100 * statistics.median(found):.1f} % ({100 * p90:.1f} %)")
    return ", ".join(texts)


def faster(lines: Lines, device: str) -> str:
    return span([ratio(line) for line in lines if line["device"].startswith(device)], "{:.2f}x")


def losing(lines: Lines) -> str:
    ratios = [ratio(line) for line in lines]
    return f"{sum(each < 0.98 for each in ratios)} of {len(ratios)}; {min(ratios):.3f}x"


def all_errors(lines: Lines) -> str:
    plans = [engine for line in lines for engine in line["engines"].values()]
    return f"{sum(bool(plan.get('predicted')) for plan in plans)} plans: {errors(plans)}"


def off(lines: Lines) -> str:
    found = next(line["vs_baseline"] for line in lines if line["vs_baseline"])
    form = "{value:.3f}x ({low:.3f}-{high:.3f})".format
    return f"TTFT {form(**found['ttft'])}, TPOT {form(**found['tpot'])}"


def placements(lines: Lines) -> str:
    return span([n for line in lines for n in line.get("nmse", []) if "mixes_with_vulkan" in line["test"]], "{:.1e}")


def device_bytes(lines: Lines) -> str:
    cells = [line for line in lines if "predicted" in line]
    worst = max(abs(m - p) for line in cells for m, p in zip(line["measured"], line["predicted"], strict=True))
    return f"at most {worst:.0f} in {len(cells)} cells"


def oom_grid(lines: Lines) -> str:
    cells = [line for line in lines if "cell" in line]
    ran = [line for line in cells if line["outcome"] == "ok"]
    over = sum(line["measured"] > line["limit"] for line in ran)
    return f"{len(cells)}: {over} over budget, {len(cells) - len(ran)} refused"


def planning(lines: Lines, shape: str) -> str:
    of_shape = [line for line in lines if line["shape"] == shape]
    seconds = {line["planner"]: line["median_s"] for line in of_shape if not line["traced"]}
    traced = [f", with a routing trace {line['median_s']:.1f} s" for line in of_shape if line["traced"]]
    return f"{seconds['exact']:.1f} s; `auto` {seconds['auto']:.1f} s{''.join(traced[-1:])}"


def first_profile(lines: Lines) -> str:
    (line,) = lines
    whole, *devices = (statistics.median(times) for times in (line["seconds"], *line["devices_s"].values()))
    return f"{whole:.0f} s; {', '.join(f'{seconds:.0f} s' for seconds in devices)}"


def second_start(lines: Lines) -> str:
    return span([line["added_s"] for line in lines], "{:.2f} s")


def won_back(lines: Lines) -> str:
    found = next(line for line in lines if line.get("device") == "RPC0" and line["n_ubatch"] == 512)
    return f"{found['before'] / 2**20:.0f} MiB, {found['after'] / 2**20:.1f} MiB"


def saved(lines: Lines, model: str) -> str:
    return span([-100 * line["saved"] for line in lines if str(line.get("model", "")).startswith(model)], "{:.0f} %")


def engine_of(lines: Lines, name: str) -> dict[str, Any]:
    return next(line for line in lines if line.get("engine") == name)


def against_star(lines: Lines) -> str:
    ours = engine_of(lines, "auto")
    return f"TTFT {100 * ours['ttft_against_star']:+.0f} %, tokens/s {100 * ours['tokens_per_s_against_star']:+.0f} %"


def against_rpc(lines: Lines) -> str:
    ours, theirs = engine_of(lines, "auto"), engine_of(lines, "rpc")
    times = (theirs[key] / ours[key] for key in ("median_ttft_s", "median_tpot_s"))
    return ", ".join(f"{each:.1f}x faster" for each in times)


def request_s(of: dict[str, float], prefix: str) -> float:
    return of[f"{prefix}ttft_s"] + 31 * of[f"{prefix}tpot_s"]


def pipeline(*runs: Lines) -> str:
    cells = [[line for line in lines if line.get("plan") == "as priced"] for lines in runs]
    worst = (max(abs(request_s(x["predicted"], "") / request_s(x, "median_") - 1) for x in each) for each in cells)
    return "; ".join(f"within {100 * each:.1f} %" for each in worst)


def weave(lines: Lines) -> str:
    graphs, operators = (
        statistics.median(statistics.median(line["hot_s"]) for line in lines if line.get("mode") == mode)
        for mode in ("graphs", "operators")
    )
    return f"{graphs / operators:.1f}x faster"


def capacity(lines: Lines) -> str:
    def in_time(line: dict[str, Any]) -> float:
        return float(next(model["attainment"] for model in line["models"] if model["model"] == "hot"))

    def rate(way: str) -> float:
        points = sorted((line["hot_rate"], in_time(line)) for line in lines if line.get("way") == way)
        return next(a + (b - a) * (p - 0.9) / (p - q) for (a, p), (b, q) in pairwise(points) if p >= 0.9 > q)

    return f"{rate('guests') / rate('dedicated'):.2f}x"


def soak(lines: Lines) -> str:
    every = next(line for line in lines if line.get("kind") == "all")
    return f"{every['faults']}: {every['wrong']}, {every['hangs']}; {every['noticed_ms']['max']:.0f} ms"


def oato(lines: Lines) -> str:
    return span([line["vs_baseline"]["tpot"]["value"] for line in lines if line["engine"] == "oallama"], "{:.2f}x")


def clone(lines: Lines) -> str:
    """`make demo`, the same again, `make check` and `make test`, one after the other."""
    return "; ".join(f"{line['seconds']:.0f} s" for line in lines)


def writing(lines: Lines) -> str:
    made = next(line for line in lines if line["what"].startswith("make_model"))
    return f"{made['seconds']:.1f} s; {made['peak_rss_bytes'] / 1e6:.0f} MB"


def attention(*files: Lines, cache: str) -> str:
    found = [line for lines in files for line in lines if line["cache"] == cache]
    return span([line["ours_times_rival"]["value"] for line in found], "{:.1f}x")


def prompts(lines: Lines) -> str:
    return "; ".join(f"{line['type']} {line['times_rival']['value']:.2f}x" for line in lines)


def at_depth(lines: Lines, time: str, rival: str) -> str:
    """By model, at its depths in order."""
    found: dict[str, list[str]] = {}
    for line in sorted(lines, key=lambda line: (line["model"], line["depth"])):
        if rival in line["times"][time]:
            found.setdefault(line["model"], []).append(f"{line['times'][time][rival]['value']:.2f}x")
    return "; ".join(f"{model.replace(':', ' ')} {', '.join(each)}" for model, each in found.items())


def against_wheels(lines: Lines, setting: str) -> str:
    (times,) = (line["times"] for line in lines if line["setting"] == setting)
    both = ((name, *(times[key][t]["value"] for t in ("ttft_s", "tpot_s"))) for name, key in WHEELS.items())
    return "; ".join(f"{name}: TTFT {ttft:.2f}x, TPOT {tpot:.2f}x" for name, ttft, tpot in both)


BUSY = {
    "none": "quiet",
    "half": "half a core",
    "one": "a core",
    "bursty": "a core every other second",
    "memory": "a core that copies memory",
    "all": "all cores",
    "twice": "all cores twice",
}


def beside_loads(*files: Lines, what: str, rival: str) -> str:
    """The newest measurement beside each load."""
    by_load = {line["load"]: line["ours_faster"][rival]["value"] for line in chain(*files) if line["what"] == what}
    return "; ".join(f"{words} {by_load[load]:.{2 if by_load[load] < 10 else 0}f}x" for load, words in BUSY.items())


def bare_root(lines: Lines) -> str:
    of = lines[-1]["median_s"]
    return f"{lines[-1]['wheel_bytes'] / 1e6:.0f} MB; {of['install']:.0f} s; {of['first token']:.1f} s"


CELLS = ("2026-11-21-cells", "2026-11-27-cells", "2026-11-29-cells-rpc")  # the newer have rivals with both -fa
CPU_CELLS = ("2026-11-25-cells-cpu", "2026-11-26-cells-cpu", "2026-11-29-cells-cpu-epyc", "2026-11-29-cells-cpu-xeon")
BUSY_THREADS = ("2026-11-28-busy-threads", "2026-11-29-busy-threads")
FASTER = "request time against llama.cpp's fastest way"
BUFFER = "compute buffer of a 128k-vocabulary llama at a micro-batch of 512: llama.cpp's, ours"
# Words of a row, its files in bench/results (without .jsonl), and what makes a text of their lines.
ROWS: list[tuple[str, tuple[str, ...], Callable[..., str]]] = [
    (f"{FASTER}, loopback RPC server", CELLS, lambda *files: faster(latest(*files), device="RPC")),
    (f"{FASTER}, CPU alone", ("2026-11-21-cells",), partial(faster, device="CPU")),
    (f"{FASTER}, Vulkan in software, which the plan leaves unused", ("2026-11-21-cells",),
     partial(faster, device="Vulkan")),
    ("cells of these three rows that are below 0.98x; the smallest", CELLS, lambda *files: losing(latest(*files))),
    ("error of predictions, chosen plans: median (90th percentile)", CELLS,
     lambda *files: errors([chosen(line) for line in latest(*files)])),
    ("the same, all measured plans", CELLS, lambda *files: all_errors(latest(*files))),
    (f"{FASTER}, CPU alone, both `-fa`, depths 0 to 8192",
     CPU_CELLS, lambda *files: faster(latest(*files), device="CPU")),
    ("error of predictions there, chosen plans: median (90th percentile)",
     CPU_CELLS, lambda *files: errors([chosen(line) for line in latest(*files)])),
    ("engine without a plan against unpatched llama.cpp, interleaved rounds",
     ("2026-11-21-off-overhead", "2026-11-28-off-overhead"), lambda *files: off([*chain(*files)])),
    ("a token by our threads against llama.cpp's beside programs that keep CPUs busy; two cores, no plan",
     BUSY_THREADS, partial(beside_loads, what="tpot", rival="llama.cpp unpatched")),
    ("the same: a prompt of 128 tokens", BUSY_THREADS,
     partial(beside_loads, what="ttft", rival="llama.cpp unpatched")),
    ("the same token against llama.cpp with one thread", BUSY_THREADS,
     partial(beside_loads, what="tpot", rival="llama.cpp unpatched, a thread less")),
    ("random placements over CPU, Vulkan (lavapipe) and RPC, NMSE against the CPU", ("2026-11-21-promises",),
     placements),
    ("device bytes, measured - predicted, by cell", ("2026-11-21-promises",), device_bytes),
    ("plans loaded and run (architecture, budget, KV type, sequences, draft model)", ("2026-11-21-oom-grid",),
     oom_grid),
    ("planning QwQ-32B, dry runs included: `exact`, to 0.1 % of its bound", ("2026-11-26-planner-speed",),
     partial(planning, shape="qwq-32b")),
    ("the same of Qwen3-235B-A22B (94 layers)", ("2026-11-26-planner-speed",),
     partial(planning, shape="qwen3-235b-a22b")),
    ("a start with a kept plan, against one without a plan: three models of 8B to 235B",
     ("2026-11-24-planner-start",), second_start),
    ("the first profile of a model of 270M parameters, in all; its accelerator (RPC), its CPU",
     ("2026-11-26-profile-speed",), first_profile),
    (BUFFER, ("2026-11-21-won-back",), won_back),
    ("device bytes of `--vram minimal` against everything resident: 247M model, loaded",
     ("2026-11-22-streaming-memory",), partial(saved, model="demo")),
    ("the same by dry run: LLaMA3-8B; QwQ-32B", ("2026-11-22-streaming-memory",),
     lambda lines: f"{saved(lines, 'llama3-8b')}; {saved(lines, 'qwq-32b')}"),
    ("TTFT of streamed feed-forwards against llama.cpp's uploads, Vulkan in software",
     ("2026-11-22-streaming-uploads",),
     lambda lines: span([line["ratio"] for line in lines if line.get("what") == "uploads"], "{:.2f}x")),
    ("2 emulated hosts x 4 ranks, 1 Gbit: against the same with a star all-reduce", ("2026-11-22-cluster",),
     against_star),
    ("the same against llama.cpp's `-sm tensor` over RPC: TTFT, TPOT", ("2026-11-22-cluster",), against_rpc),
    ("layers over emulated hosts by the MILP: error of predicted request times, run 1; run 2",
     ("2026-11-22-pipeline", "2026-11-22-pipeline-again"), pipeline),
    ("a hot model's step, guests' attention after every operator against after whole graphs", ("2026-11-23-weave",),
     weave),
    ("requests/s of a hot model with 90 % in time, with guests against without", ("2026-11-23-capacity",), capacity),
    ("faults of receivers: wrong tokens, hangs; noticed after at most", ("2026-11-23-weave-soak",), soak),
    ("OATO alone, both devices on the same two cores, TPOT against `-ngl`: it loses",
     ("2026-11-21-loopback-rpc-50pct",), oato),
    ("the wheel; `pip install` of it in a bare Debian 12; the first token", ("2026-11-26-bare-root",), bare_root),
    ("the wheel against llama-cpp-python's CPU wheel, and its CUDA wheel's CPU part; CPU alone",
     ("2026-11-28-their-wheel",), partial(against_wheels, setting="CPU")),
    ("the same, half of it by RPC", ("2026-11-28-their-wheel",), partial(against_wheels, setting="50%")),
    ("fresh clone: `make demo`; again; `make check`; `make test`", ("2026-11-28-fresh-clone",), clone),
    ("one layer's attention on the CPU, our kernels against the faster of ggml's two forms: f16 cache",
     ("2026-11-24-attention", "2026-11-25-attention-xeon-huge"), partial(attention, cache="f16")),
    ("the same: q8_0 cache", ("2026-11-24-attention", "2026-11-24-attention-xeon"), partial(attention, cache="q8_0")),
    ("prompt of 512 tokens on the CPU, our kernels against llama.cpp's without AMX", ("2026-11-24-cpu-prompts",),
     prompts),
    ("2 layers of a model on the CPU, `auto` against llama.cpp's faster `-fa`: TTFT of 512 tokens behind 0 and 12288",
     ("2026-11-25-cpu-depth-huge",), partial(at_depth, time="ttft", rival="llama.cpp")),
    ("the same: TPOT", ("2026-11-25-cpu-depth-huge",), partial(at_depth, time="tpot", rival="llama.cpp")),
    ("TPOT against ik_llama.cpp's fastest flags (behind 12288 for one model)", ("2026-11-25-cpu-depth-huge",),
     partial(at_depth, time="tpot", rival="ik")),
    ("writing LLaMA3-8B in F16 (16 GB); memory at most", ("2026-11-21-first-light",), writing),
]  # fmt: skip


def by_machine() -> Iterator[str]:
    """What was measured, a column for every machine."""
    yield "| what | " + " | ".join(MACHINES) + " | where |"
    yield "|---" * (len(MACHINES) + 2) + "|"
    for what, files, measured in (*ROWS, *readme_gpu.ROWS):
        cells = []
        for machine in MACHINES:
            lines = [of_machine(read(file), machine) for file in files]
            cells.append(measured(*lines) if any(lines) else "not measured")
        yield f"| {what} | " + " | ".join(cells) + " | " + ", ".join(f"`{file}.jsonl`" for file in files) + " |"


def by_cell() -> Iterator[str]:
    """The cells of the loopback server with one host thread; the newest measurement of each."""
    cells = {
        (line["arch"], line["budget"], line["depth"]): f"{ratio(line):.2f}x"
        for file in CELLS
        for line in of_machine(read(file), "EPYC")
        if line["device"] == "RPC" and line["n_threads"] == 1
    }
    columns = [(budget, depth) for depth in (0, 2048) for budget in ("40%", "80%")]
    heads = (f"{budget[:-1]} %, {f'depth {depth}' if depth else 'empty cache'}" for budget, depth in columns)
    yield "| loopback RPC server, one host thread | " + " | ".join(heads) + " |"
    yield "|---|" + "--:|" * len(columns)
    for shown in ("llama Q8_0", "minicpm3 Q8_0 (MLA)", "qwen2 Q4_0", "qwen3moe Q8_0"):
        arch = shown.split()[0]
        yield f"| {shown} | " + " | ".join(cells[(arch, *column)] for column in columns) + " |"


def by_attention() -> Iterator[str]:
    """One layer's attention on the Xeon: one token at two depths, prompts at the larger one."""
    shown = {(1, 4096), *((n_tokens, 16384) for n_tokens in (1, 32, 128, 512))}
    lines = [line for line in read("2026-11-25-attention-xeon-huge") if (line["n_tokens"], line["depth"]) in shown]
    yield from table(lines, read("2026-11-25-products"), read("2026-11-24-peak")[0]["gflop_s"])


def main() -> int:
    made = "\n".join([BEGIN, "", *by_cell(), "", *by_machine(), "", *by_experts(), "", *by_attention(), "", END])
    if sys.argv[1:] not in (["--write"], ["--check"]):
        print(made)
        return 0
    readme = ROOT / "README.md"
    before = readme.read_text()
    begin, end = before.index(BEGIN), before.index(END) + len(END)
    after = before[:begin] + made + before[end:]
    if sys.argv[1] == "--write":
        readme.write_text(after)
        return 0
    if after != before:
        print("README.md has other numbers than bench/results: scripts/readme_numbers.py --write", file=sys.stderr)
    return int(after != before)


if __name__ == "__main__":
    sys.exit(main())
