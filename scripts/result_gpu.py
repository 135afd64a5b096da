"""Rows of the tables of numbers that were measured on a GPU (scripts/result_rows.py)."""

from __future__ import annotations

import statistics
from functools import partial
from typing import Any

from result_lines import Lines, Row

from oallama.bench.stats import speedup


def loads(lines: Lines, name: str) -> Lines:
    return [line for line in lines if line.get("name") == name and "ttft_s" in line]


def against(lines: Lines, rival: str, **cell: Any) -> str:
    """TTFT by prompt, then TPOT: the rival's over that of `auto`, in one cell."""
    ours, theirs = (
        [line for line in loads(lines, name) if all(line[key] == value for key, value in cell.items())]
        for name in ("auto", rival)
    )
    ttft = [
        speedup([line["ttft_s"][n] for line in theirs], [line["ttft_s"][n] for line in ours]).value
        for n in ours[0]["ttft_s"]
    ]
    tpot = speedup([line["tpot_s"] for line in theirs], [line["tpot_s"] for line in ours]).value
    return f"TTFT {', '.join(f'{each:.2f}x' for each in ttft)}; TPOT {tpot:.2f}x"


def predicted_tpot(*files: Lines) -> str:
    """Predicted over measured TPOT of every plan that was run."""
    found = []
    for lines in files:
        for plan in (line for line in lines if line["what"] == "plan"):
            same = [
                line for line in loads(lines, plan["name"])
                if all(line.get(key) == plan.get(key) for key in ("budget", "depth") if key in plan)
            ]  # fmt: skip
            if same:
                at = same[0]["depth"] + same[0]["prompt"]
                nearest = min(plan["predicted_tpot_s"], key=lambda n: abs(int(n) - at))
                measured = statistics.median(line["tpot_s"] for line in same)
                found.append(100 * (plan["predicted_tpot_s"][nearest] / measured - 1))
    return f"{min(found):+.0f} % to {max(found):+.0f} % in {len(found)} plans"


def errors(lines: Lines) -> str:
    """Predicted over measured seconds of a prompt and of a token, of one plan that was measured pass after pass."""
    found = []
    for line in (line for line in lines if line["what"] == "times"):
        each = [100 * (line["predicted_s"] / wall - 1) for wall in line["walls_s"]]
        name = {"prefill": "TTFT", "decode": "TPOT"}[line["stage"]]
        found.append(f"{name} {round(min(each)):+d} % to {round(max(each)):+d} %")
    return "; ".join(found)


def receiver(lines: Lines) -> str:
    found = [line["ggml_s"] / statistics.median(line["receiver_s"]) for line in lines if line["what"] == "attention"]
    return f"{min(found):.2f}x to {max(found):.2f}x"


def device_sums(lines: Lines) -> str:
    """Of two ranks, by bytes."""
    times = {line["n_bytes"]: [statistics.median(line[way]) for way in ("staged_s", "device_s")]
             for line in lines if line["ranks"] == 2}  # fmt: skip
    return "; ".join(f"{n_bytes // 1024} KiB {host / device:.2f}x" for n_bytes, (host, device) in times.items())


def stream_rates(lines: Lines) -> str:
    """Of the link's peak, by prompt; then what they are where the host keeps the order."""
    found = {
        name: [100 * line["of_peak"] for line in lines if line["what"] == "stream rate" and line["name"] == name]
        for name in ("streamed", "host order")
    }
    by_host = found["host order"]
    return f"{min(found['streamed']):.0f} % or more; {min(by_host):.0f} to {max(by_host):.0f} %"


SECOND = "2026-11-26-h100-second"
ROWS = [
    Row("32B Q4_K_M in 16 GiB of an H100, 16384 tokens deep, against `--fit`: 512 tokens more; a later round",
     ("2026-11-26-h100-deep", f"{SECOND}-deep"),
     lambda *files: "; then ".join(against(lines, rival="fit", depth=16384) for lines in files), True),
    Row("8B F16 in 25 % of its bytes on an H100, against `-ngl`: 32, 128 and 512 tokens", (f"{SECOND}-budgets",),
     partial(against, rival="layers", budget="25%"), True),
    Row("8B F16 in 50 %", (f"{SECOND}-oato",), partial(against, rival="layers", budget="50%")),
    Row("8B F16 in 75 %, three rounds", (f"{SECOND}-budgets",), partial(against, rival="layers", budget="75%")),
    Row("all of 8B F16 streamed: share of the link's peak; the same where the host keeps the order (one round)",
     (f"{SECOND}-streams",), stream_rates),
    Row("error of predicted TPOT of plans at 25, 50 and 75 %; of two deep ones (one round)",
     (f"{SECOND}-oato", f"{SECOND}-budgets", f"{SECOND}-deep"),
     lambda *files: f"{predicted_tpot(*files[:2])}; {predicted_tpot(*files[2:])}"),
    Row("the same of another deep plan, three passes in a row with nothing beside them",
     ("2026-11-27-h100-times",), errors),
    Row("attention of a weave's receiver on a GPU against ggml-cuda's: 15 of 16 cells lose",
     ("2026-11-27-h100-weave-cuda",), receiver),
    Row("sums of two ranks in the memory of one GPU against staging in the host's", ("2026-11-26-h100-ranks",),
     device_sums),
]  # fmt: skip
