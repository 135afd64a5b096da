"""Routing of the demo mixture: what k experts of a layer hit, and how many experts batches use.

python bench/demo_routing.py [--out FILE.jsonl]

Its own kind of text (held out from training) and our mixed text; one JSON line per text and stage: means of the layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from oallama import Llama, demo_model
from oallama.bench.machine import describe
from oallama.bench.script import arguments, record
from oallama.cli.routing import MIXED_TEXT
from oallama.data.expert_hits import POLICIES, counts, hit_rates, uniform_union, union_sizes, union_widths
from oallama.engine import native
from oallama.storyteller import held_out_text
from oallama.tracing.experts import record_experts

N_EXPERT, N_USED, N_GENERATE = 32, 4, 1024
KS, WIDTHS = (4, 8, 16, 24), (1, 8, 64, 256)


def measured() -> Iterator[dict[str, Any]]:
    texts = {"held-out stories": held_out_text().encode(), "mixed": MIXED_TEXT.read_bytes()}
    for name, text in texts.items():
        watch = native.core().ExpertWatch()
        llm = Llama(str(demo_model("mixture")), eval_callback=watch.addresses, verbose=False, n_ctx=512, n_threads=1)
        for stage, ids in record_experts(llm, watch, llm.tokenize(text), N_GENERATE).ids.items():
            yield {"bench": "demo-routing", "text": name, "stage": stage, "n_tokens": ids.shape[1], **judged(ids)}
        llm.close()


def judged(ids: Any) -> dict[str, Any]:
    used = counts(ids, N_EXPERT)
    shares = used / used.sum(axis=1, keepdims=True)
    unions = dict(zip(union_widths(ids.shape[1]), union_sizes(ids, N_EXPERT).mean(axis=0), strict=True))
    return {
        "hits": {p: {k: percent(hit_rates(ids, N_EXPERT, p).mean(axis=0)[k - 1]) for k in KS} for p in POLICIES},
        "uniform": {k: percent(k / N_EXPERT) for k in KS},
        "unions": {n: [round(float(unions[n]), 2), round(uniform_union(N_EXPERT, N_USED, n), 2)] for n in WIDTHS},
        "repeats": percent((ids[:, 1:, :, None] == ids[:, :-1, None, :]).any(axis=3).mean()),
        "hottest_by_layer": [percent(row.max()) for row in shares],
        "coldest_by_layer": [percent(row.min()) for row in shares],
    }


def percent(share: Any) -> float:
    return round(100 * float(share), 1)


def main() -> None:
    options = arguments(__doc__, "demo-routing").parse_args()
    record(measured(), options.out, each={"machine": describe()})


if __name__ == "__main__":
    main()
