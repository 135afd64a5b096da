"""The tables of bench/cells.py, from its lines; older ones have each stock rival in one form of attention only."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

N_FIRST = ("layers", "fewer-layers", "fit", "cpu-moe", "cpu-ffn")
CPU_ALONE = "llama.cpp CPU"
WHERE = ("model", "device", "host threads", "budget", "depth")
DRIFTED = "chosen TPOT where the machine's drift was measured"
Line = dict[str, Any]


def is_stock(engine: str) -> bool:
    """Whether an engine is llama.cpp's own placement: "layers -fa off", "cpu-ffn-last -fa auto", in old lines "fit"."""
    return engine.partition(" -fa ")[0].removesuffix("-last") in N_FIRST


def form_of(engine: Line) -> str:
    """ "off", or "auto" for fused where there is such an operator."""
    flash = engine.get("flash_attn") or (engine.get("params") or {}).get("flash_attn", "auto")
    return "off" if flash == "off" else "auto"


def chosen_of(line: Line) -> Line:
    engine: Line = line["engines"][line["same_as"].get(line["chosen"], line["chosen"])]
    return engine


def best_stock(line: Line, same_form: bool | None = None) -> tuple[str, float] | None:
    """The fastest of llama.cpp's own ways, its CPU where no accelerator is used; None when there is none.

    same_form: only those with the chosen plan's form of attention, or only the others.
    """

    def fits(engine: Line) -> bool:
        return same_form is None or (form_of(engine) == form_of(chosen_of(line))) == same_form

    found = {n: e["request_s"] for n, e in line["engines"].items() if is_stock(n) and fits(e)}
    if not any(map(is_stock, line["engines"])):
        found = {n: e["request_s"] for n, e in line["engines"].items() if n.startswith(CPU_ALONE) and fits(e)}
    return min(found.items(), key=lambda item: item[1]) if found else None


def ratio(line: Line, same_form: bool | None = None) -> float | None:
    """How much longer the best rival takes than the chosen plan."""
    best = best_stock(line, same_form)
    return None if best is None else float(best[1] / chosen_of(line)["request_s"])


def summary(line: Line) -> str:
    """What a cell gave, in a line."""
    parts = [
        f"{found:.3f}x of the best stock with {words} -fa"
        for same, words in ((True, "its"), (False, "the other"))
        if (found := ratio(line, same)) is not None
    ]
    return f"chosen {line['chosen']}, {', '.join(parts)}"


def tables(lines: list[Line]) -> str:
    """Both tables as markdown, once per machine."""
    machines = defaultdict(list)
    for line in lines:
        hardware = line["machine"]["hardware"]
        machines[f"{hardware['cpu']}, {hardware['cpus_allowed']} CPUs"].append(line)
    parts = [[f"# {machine}", "", *_never_slower(some), "", *_errors(some), ""] for machine, some in machines.items()]
    return "\n".join(text for part in parts for text in part)


def _never_slower(lines: list[Line]) -> list[str]:
    n_prompt, n_generate = lines[0]["n_prompt"], lines[0]["n_generate"]
    rival = ("best stock", "request s", "ratio")
    head = (*WHERE, "chosen", "request s", *rival, *rival, "its CPU alone s")
    out = [
        "## Never slower",
        "",
        f"Request = TTFT of {n_prompt} tokens + {n_generate - 1} x TPOT, medians of interleaved rounds. Above 1x the "
        "chosen plan is faster. The first rival has the chosen plan's form of attention, so its ratio is what "
        "placement gains; the second has the other form.",
        "",
        _row(head),
        _row(["---"] * len(head)),
    ]
    for line in lines:
        cells = [line["chosen"], f"{chosen_of(line)['request_s']:.3f}"]
        for same in (True, False):
            best = best_stock(line, same)
            found = ratio(line, same)
            cells += ["-"] * 3 if best is None else [best[0], f"{best[1]:.3f}", f"{found:.3f}x"]
        cpu = min(e["request_s"] for n, e in line["engines"].items() if n.startswith(CPU_ALONE))
        out.append(_row((*where(line), *cells, f"{cpu:.3f}")))
    out.append("")
    for same, words in ((None, "the best of all rivals"), (True, "the same form"), (False, "the other form")):
        ratios = sorted(found for line in lines if (found := ratio(line, same)) is not None)
        if ratios:
            losing = sum(r < 0.98 for r in ratios)
            out.append(
                f"- Against {words}: {len(ratios)} cells, {losing} below 0.98x; min {ratios[0]:.3f}x, median "
                f"{statistics.median(ratios):.3f}x, max {ratios[-1]:.3f}x."
            )
    return [*out, "", *_planners(lines)]


def _planners(lines: list[Line]) -> list[str]:
    """Every other planner of ours that was measured, OATO among them, against the best rival."""
    found = defaultdict(list)
    for line in lines:
        best = best_stock(line)
        for name in {*line["engines"], *line["same_as"]}:
            engine = line["engines"][line["same_as"].get(name, name)]
            if best is not None and not is_stock(name) and not name.startswith(CPU_ALONE):
                found[name].append(best[1] / engine["request_s"])
    out = ["| planner | cells | min | median | max |", "|---|---:|---:|---:|---:|"]
    for name, ratios in sorted(found.items()):
        numbers = (min(ratios), statistics.median(ratios), max(ratios))
        out.append(_row((name, str(len(ratios)), *(f"{r:.3f}x" for r in numbers))))
    return ["Planners against the best of all rivals, in the cells where they were measured:", "", *out]


def off(lines: list[Line]) -> dict[str, list[float]]:
    """Shares by which requests of chosen plans were off, and ratios of the others' requests to them, by kind.

    Kinds tell apart whether the host alone computes, in both where there are two.
    """
    found = defaultdict(list)
    for line in lines:
        chosen = chosen_of(line)
        for engine in line["engines"].values():
            if not (chosen["predicted"] and engine["predicted"]):
                continue
            where = "with a device" if chosen["device_bytes"] or engine["device_bytes"] else "the host alone"
            if engine is chosen:
                found[f"chosen request, {where}"].append(abs(_longer(chosen) - 1))
            else:
                found[f"ratio of requests, {where}"].append(abs(_longer(engine) / _longer(chosen) - 1))
    return dict(found)


def _longer(engine: Line) -> float:
    """How many times longer a request took than predicted."""
    return float(engine["request_s"] / engine["predicted"]["request_s"])


def nine_of_ten(values: Iterable[float]) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))]


def _errors(lines: list[Line]) -> list[str]:
    head = (*WHERE, "plan", "TTFT ms", "predicted", "error", "TPOT ms", "predicted", "error")
    out = ["## Prediction error", "", "Predicted against the measured median, in percent of it.", ""]
    out += [_row(head), _row(["---"] * len(head))]
    kinds = ("TTFT", "TPOT", "chosen TTFT", "chosen TPOT", DRIFTED, f"{DRIFTED}, less the drift")
    every: dict[str, list[float]] = {kind: [] for kind in kinds}
    for line in lines:
        for name, e in line["engines"].items():
            if not e["predicted"]:
                continue
            cells = []
            for kind in ("TTFT", "TPOT"):
                key = f"{kind.lower()}_s"
                error = 100 * (e["predicted"][key] / e[key] - 1)
                cells += [f"{1e3 * e[key]:.2f}", f"{1e3 * e['predicted'][key]:.2f}", f"{error:+.1f} %"]
                every[kind].append(abs(error))
                if e is chosen_of(line):
                    every[f"chosen {kind}"].append(abs(error))
            if e is chosen_of(line) and "drift" in line:
                every[DRIFTED].append(every["chosen TPOT"][-1])
                every[kinds[-1]].append(abs(100 * (_drifted(line, e) / e["tpot_s"] - 1)))
            out.append(_row((*where(line), name, *cells)))
    out.append("")
    every |= {kind: [100 * share for share in shares] for kind, shares in sorted(off(lines).items())}
    for kind, values in every.items():
        if values:
            out.append(
                f"- {kind}: {len(values)} values, median {statistics.median(values):.1f} %, "
                f"p90 {nine_of_ten(values):.1f} %, max {max(values):.1f} %"
            )
    return out


def _drifted(line: Line, engine: Line) -> float:
    """Predicted seconds of a token on devices that are as fast as they were around the cell."""
    seconds: float = engine["predicted"]["tpot_s"]
    for device, each in engine["token_by_device"].items():
        seconds += each * (statistics.mean(line["drift"][device]) - 1)
    return seconds


def rounds(lines: list[Line]) -> str:
    """Mean errors by commit: of each prediction against the median of all measurements of that plan, of any commit.

    Plans are taken to be one where the cell, the planner, and the form of attention are. "own run" compares with the
    measurement right after it instead, which the drift of the machine is part of.
    """
    measured, found = defaultdict(list), defaultdict(list)
    for line in lines:
        for name, e in line["engines"].items():
            for kind in ("ttft_s", "tpot_s"):
                plan = (*where(line), name, (e["params"] or {}).get("flash_attn"), kind)
                measured[plan].append(e[kind])
                if e["predicted"]:
                    found[line["device"], kind, line["machine"]["commit"][:7]].append((plan, e))
    head = ("device", "time", "commit", "predictions", "mean error, pooled", "own run", "signed, pooled")
    out = [_row(head), _row(["---"] * len(head))]
    for (device, kind, commit), some in sorted(found.items()):
        pooled = [100 * (e["predicted"][kind] / statistics.median(measured[plan]) - 1) for plan, e in some]
        own = [100 * abs(e["predicted"][kind] / e[kind] - 1) for _, e in some]
        means = (statistics.mean(map(abs, pooled)), statistics.mean(own))
        cells = (*(f"{m:.1f} %" for m in means), f"{statistics.mean(pooled):+.1f} %")
        out.append(_row((device, kind[:4].upper(), commit, str(len(some)), *cells)))
    return "\n".join(out)


def where(line: Line) -> tuple[str, ...]:
    return line["arch"], line["device"], str(line["n_threads"]), line["budget"] or "-", str(line["depth"])


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
