"""A plan of thirteen layers that nobody planned."""

from __future__ import annotations

from dataclasses import replace

from oallama.data.plan import HOST, ContextSettings, DeviceMemory, PlacementPlan, Prediction, TensorPlacement

KINDS = ("attn_norm", "attn_q", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
NAMES = [
    "token_embd.weight",
    *(f"blk.{il}.{kind}.weight" for il in range(12) for kind in KINDS),
    *(f"blk.{il}.attn_q.bias" for il in range(12)),
    "output_norm.weight",
    "output.weight",
    "rope_freqs.weight",
]


def make(on_host=("blk.3.ffn_up.weight", "blk.11.ffn_up.weight"), upload=(), layers=None, **changes) -> PlacementPlan:
    hosted = {"token_embd.weight", *on_host, *upload}
    plan = PlacementPlan(
        model={"name": "m", "size": 7},
        planner={"name": "oato", "params": {"fraction": 0.9}},
        budgets={"GPU0": 1000},
        context=ContextSettings(n_ctx=512),
        devices=("GPU0", HOST),
        layers=layers or ("GPU0",) * 13,
        tensors={
            name: TensorPlacement.whole(
                "f16",
                10,
                HOST if name in hosted else "GPU0",
                "upload" if name in upload else "host" if name in hosted else "resident",
                0.5 if "ffn" in name else None,
            )
            for name in NAMES
        },
        predicted=Prediction(
            devices={"GPU0": DeviceMemory(1, 2, 3), HOST: DeviceMemory(4, 0, 0)},
            ttft_s={32: 0.1, 512: 1 / 3},
            tpot_s={0: 0.01},
            workload=(512, 128),
            request_s=1.5,
            notes=("a note",),
        ),
    )
    return replace(plan, **changes)
