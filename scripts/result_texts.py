"""What the lines of a record say, as the text of a table's cell (scripts/result_tables.py)."""

from __future__ import annotations

import statistics
from itertools import chain
from typing import Any

from result_lines import Lines, span

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


def own_attention(lines: Lines) -> str:
    """By round: the hot model's step with ggml's attention over that with ours. The median, and all."""
    theirs, ours = (
        [statistics.median(line["hot_s"]) for line in lines if line.get("mode") == mode] for mode in ("parts", "ours")
    )
    gains = [a / b for a, b in zip(theirs, ours, strict=True)]
    return f"{statistics.median(gains):.2f}x ({span(gains, '{:.2f}')})"


def capacity(*files: Lines) -> str:
    """Of guests over the best of the other ways, by the medians of the seeds' highest rates."""
    rates: dict[str, list[float]] = {}
    for line in chain(*files):
        if "highest_met" in line:
            rates.setdefault(line["way"], []).append(line["highest_met"])
    highest = {way: statistics.median(found) for way, found in rates.items()}
    guests = highest.pop("guests")
    return f"{guests / max(highest.values()):.2f}x"


def planned_hot(lines: Lines) -> str:
    (line,) = lines
    return "; ".join(
        f"{which} {found['value']:.2f}x ({found['low']:.2f} to {found['high']:.2f})"
        for which, found in line["planned_is_faster"].items()
    )


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


def few_columns(lines: Lines) -> str:
    """By type, the least and the most over the numbers of columns from 2 on."""
    found: dict[str, list[float]] = {}
    for line in lines:
        if line["rows"] > 1:
            found.setdefault(line["type"], []).append(line["times_rival"]["ours avx2"]["value"])
    return "; ".join(f"{type.upper()} {span(each, '{:.1f}x')}" for type, each in found.items())


def at_depth(*files: Lines, time: str, rival: str) -> str:
    """By model, at its depths in order."""
    found: dict[str, list[str]] = {}
    for line in sorted(chain(*files), key=lambda line: (line["model"], line["depth"])):
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
