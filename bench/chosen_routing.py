"""Routing that made mixtures were asked for, beside what a trace of them shows.

python bench/chosen_routing.py [--out FILE.jsonl]

One JSON line per model and stage: the static share by the law, and hits of static experts and of LRU, at k experts of a
layer, means of the layers. temperature: of sampling; 0.001 takes the likeliest token.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from oallama import Llama
from oallama.bench.machine import describe
from oallama.bench.script import arguments, record
from oallama.cli.routing import MIXED_TEXT
from oallama.data.expert_hits import hit_rates
from oallama.engine import native
from oallama.modelmaker import make_model
from oallama.modelmaker.routing import Routing, use_rates
from oallama.tracing import experts

TEXT_TOKENS = 2048
_30B = {"arch": "qwen3moe", "shape": "qwen3-30b-a3b", "overrides": {"n_layer": 2, "n_ff_expert": 256}}
_20B = {"arch": "gpt-oss", "shape": "gpt-oss-20b", "overrides": {"n_layer": 1, "n_ff_expert": 320, "n_vocab": 32768}}
_TINY = {"arch": "qwen3moe"}
_64 = {"arch": "qwen3moe", "overrides": {"n_expert": 64}}
# routing, model, file type, tokens generated, temperature
CASES: tuple[tuple[str, dict[str, Any], str, int, float], ...] = (
    ("zipf:0", _TINY, "F16", 1024, 0.8),
    ("zipf:1", _TINY, "F16", 1024, 0.8),
    ("zipf:1.2", _64, "Q4_0", 1024, 0.8),
    ("zipf:0,locality:0.5", _TINY, "F16", 1024, 0.8),
    ("zipf:0,locality:0.5", _TINY, "F16", 1024, 0.001),
    ("zipf:0,locality:0.8", _TINY, "F16", 1024, 0.8),
    ("zipf:0.8,locality:0.9", _64, "Q8_0", 1024, 0.8),
    ("zipf:1.2,locality:0.6", _20B, "MXFP4", 256, 0.8),
    ("zipf:0,locality:0.65", _30B, "Q4_K_M", 256, 0.8),
)


def measured() -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        for routing, model, file_type, n_generate, temperature in CASES:
            path = make_model(Path(folder) / "m.gguf", file_type=file_type, routing=routing, **model)
            experts.TEMPERATURE = temperature
            ids, n_experts = traced(path, n_generate)
            common = {"routing": routing, **model, "type": file_type, "temperature": temperature}
            for stage, chosen in ids.items():
                yield {**common, "stage": stage, **judged(chosen, n_experts, Routing.parse(routing).skew)}


def traced(path: Path, n_generate: int) -> tuple[dict[str, Any], int]:
    watch = native.core().ExpertWatch()
    llm = Llama(str(path), eval_callback=watch.addresses, verbose=False, n_ubatch=128, n_batch=128, n_ctx=512)
    try:
        tokens = llm.tokenize(MIXED_TEXT.read_bytes())[:TEXT_TOKENS]
        n_experts = int(llm.metadata[f"{llm.metadata['general.architecture']}.expert_count"])
        return dict(experts.record_experts(llm, watch, tokens, n_generate).ids), n_experts
    finally:
        llm.close()


def judged(ids: Any, n_experts: int, skew: float) -> dict[str, Any]:
    n_used = ids.shape[2]
    law = use_rates(skew, n_experts, n_used).cumsum() / n_used
    static, lru = (hit_rates(ids, n_experts, policy).mean(axis=0) for policy in ("static", "lru"))
    repeats = (ids[:, 1:, :, None] == ids[:, :-1, None, :]).any(axis=3).mean()
    at = {
        str(k): [round(float(np.asarray(row)[k - 1]), 4) for row in (law, static, lru)]
        for k in (n_experts // 8, n_experts // 4, n_experts // 2)
    }
    return {
        "n_tokens": ids.shape[1],
        "n_experts": n_experts,
        "n_used": n_used,
        "repeats": round(float(repeats), 4),
        "law_static_lru": at,
    }


def main() -> None:
    options = arguments(__doc__, "chosen-routing").parse_args()
    record(measured(), options.out, each={"machine": describe()})


if __name__ == "__main__":
    main()
