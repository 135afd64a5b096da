"""PlacementPlan: where every weight of one model lives and what that is predicted to give.

The one data structure that crosses all levels. It knows nothing of ggml, planners or profiles: planners write it, the
engine obeys its backend map, the front doors show it. Its file format is `schemas/plan.schema.json`.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..base.jsonfile import parse_json_object, read_json_object, write_text_atomic
from ..errors import OallamaError
from . import plan_export
from .layer_experts import ExpectedExperts
from .plan_export import HOST, is_divided_by_columns
from .tensor_placement import Mode, Segment, TensorPlacement

if TYPE_CHECKING:
    import jsonschema

SCHEMA = "oallama.plan/1"
SCHEMA_FILE = Path(__file__).parent / "schemas" / "plan.schema.json"
REMEDY = "make a new one with `oallama plan`"

STREAM_SLOTS = 3  # one is read, one is full, one is being filled
SLOT_UPLOADS = 1  # experts


@dataclass(frozen=True)
class ContextSettings:
    """What the context must be created with for the prediction to hold.

    flash_attn: "auto", "on" or "off". attention: whose kernels compute fused attention on CPUs, one of
    `entries.KERNELS`. use_mmap: False for weights that are read into memory, from where an accelerator that has pinned
    memory copies faster than from the mapped file; None for llama.cpp's way. n_outputs_max: most rows of a micro-batch
    whose logits are computed, 0 for llama.cpp's n_batch; one row per sequence is enough for generation and saves the
    memory of the others' logits.
    """

    n_ctx: int
    n_batch: int = 2048
    n_ubatch: int = 512
    n_seq_max: int = 1
    type_k: str = "f16"
    type_v: str = "f16"
    flash_attn: str = "auto"
    n_outputs_max: int = 0
    attention: str = "ggml"
    use_mmap: bool | None = None


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes on one device. `pool`: what the backend takes while it computes, an estimate (planning/pool.py)."""

    weights: int
    kv: int
    compute: int
    pool: int = 0

    @property
    def buffers(self) -> int:
        """What llama.cpp allocates when it loads: all but the pool. This is exact."""
        return self.weights + self.kv + self.compute

    @property
    def working(self) -> int:
        """What computing takes beside weights and KV cache."""
        return self.compute + self.pool

    @property
    def total(self) -> int:
        return self.buffers + self.pool


@dataclass(frozen=True)
class Prediction:
    """Predicted bytes per device, TTFT seconds by prompt length and TPOT seconds by depth.

    `request_s` is TTFT + (n_generate - 1) * TPOT of the workload (n_prompt, n_generate) the planner optimised,
    `range_s` the seconds between which it is expected, None for plans of older versions. `terms` are its seconds by
    stage, device and kind of work ("CPU matrices"), before what was learned from runs; `learned` what they were
    multiplied by. `parts` says where these seconds go: "prefill" and "decode", each by cause. `experts` are the uses of
    a mixture's experts that accelerators are expected to compute, None for dense models and in older plans. `notes` say
    what the prediction leaves out.
    """

    devices: Mapping[str, DeviceMemory]
    ttft_s: Mapping[int, float]
    tpot_s: Mapping[int, float]
    workload: tuple[int, int]
    request_s: float
    notes: tuple[str, ...] = ()
    parts: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    range_s: tuple[float, float] | None = None
    terms: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    learned: Mapping[str, float] = field(default_factory=dict)
    experts: ExpectedExperts | None = None


@dataclass(frozen=True)
class PlacementPlan:
    """Where every weight of one model lives.

    model: fingerprint of the file. planner: {"name", "params"}. budgets: bytes each device may hold. devices:
    accelerators first, "CPU" last. layers: home of the KV cache and attention of layers 0..n-1, MTP heads included,
    then of the output layer. stream_slots: device buffers that streamed weights take turns in. slot_uploads: experts
    that a layer with slots may upload in a step (segments with `slots`). stream_caches: attention over KV caches that
    live on the CPU runs on the first accelerator all the same. offline_arenas: compute buffers are laid out offline
    instead of by ggml. whole_layers: every layer is on one device, where all of its operators run. margins: bytes of a
    device's free memory that the budget "auto" leaves free. measured is filled in after a run and is not part of the
    hash.
    """

    model: Mapping[str, Any]
    planner: Mapping[str, Any]
    budgets: Mapping[str, int]
    context: ContextSettings
    devices: tuple[str, ...]
    layers: tuple[str, ...]
    tensors: Mapping[str, TensorPlacement]
    predicted: Prediction
    tied_output: bool = False
    stream_slots: int = STREAM_SLOTS
    slot_uploads: int = SLOT_UPLOADS
    stream_caches: bool = False
    offline_arenas: bool = False
    whole_layers: bool = False
    margins: Mapping[str, int] = field(default_factory=dict)
    measured: Mapping[str, Any] | None = None
    schema: str = field(default=SCHEMA)

    @property
    def repacked_nbytes(self) -> int:
        """Bytes of weights that lie repacked on the host: memory of their own, beside a mapped file."""
        return sum(s.nbytes for t in self.tensors.values() for s in t.segments if "repacked" in s.realisation)

    # ---- identity -------------------------------------------------------------------------------------------------

    @cached_property
    def hash(self) -> str:
        """sha256 of the canonical content without `measured`: equal plans have equal hashes on every machine."""
        return _hash(self._content())

    def with_measured(self, measured: Mapping[str, Any]) -> PlacementPlan:
        """The same plan (same hash) with what a run measured."""
        return replace(self, measured=measured)

    def check_model(self, fingerprint: Mapping[str, Any]) -> None:
        """Raises OallamaError unless the plan was made for the model with this fingerprint."""
        check_model(self.model, fingerprint, REMEDY)

    def check_devices(self, available: Iterable[str]) -> None:
        """Raises OallamaError when the plan uses a device that this machine does not have."""
        have = [*available]
        unknown = [device for device in self.devices if device not in have]
        if unknown:
            raise OallamaError(
                f"the plan uses device {unknown[0]!r}, this machine has {', '.join(have) or 'none'}; {REMEDY} here"
            )

    # ---- exports --------------------------------------------------------------------------------------------------

    def to_backend_map(self) -> str:
        """The table the patched engine obeys (docs/architecture.md). Raises OallamaError for split tensors."""
        return plan_export.backend_map(self)

    def to_llama_cpp_flags(self, program: Literal["llama.cpp", "llama-bench"] = "llama.cpp") -> list[str]:
        """`-ngl N -ot REGEX=CPU,...` for unpatched llama.cpp, as an argument list.

        Regular expressions are anchored and match exactly the intended names. llama-bench separates overrides with ";"
        and is written so. `--no-op-offload` is added when no tensor is to be uploaded; a mix of "host" and "upload" is
        beyond stock llama.cpp, which then uploads all of them, streamed ones too. Raises OallamaError for what flags
        cannot say.
        """
        return plan_export.llama_cpp_flags(self, program)

    # ---- file -----------------------------------------------------------------------------------------------------

    def _content(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads(json.dumps(asdict(self)))  # tuples become lists, int keys become strings
        for name, memory in self.predicted.devices.items():
            content["predicted"]["devices"][name]["total"] = memory.total
        return content

    def to_json(self) -> str:
        """The plan as JSON text that satisfies `schemas/plan.schema.json`."""
        return json.dumps({**self._content(), "hash": self.hash}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str, source: str = "plan") -> PlacementPlan:
        """Read `to_json`'s text; `source` names it in messages.

        Raises OallamaError for corrupt JSON, another version, content that does not fit the schema, or a device that
        the plan does not list. A plan edited by hand is welcome: `hash` is computed from the content, not read.
        """
        return cls._from_content(parse_json_object(text, source, REMEDY), source)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan aside, then rename. Raises OallamaError when the path cannot be written."""
        write_text_atomic(path, self.to_json(), "plan")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> PlacementPlan:
        """Read a plan file; raises OallamaError as `from_json`, and when the file is missing."""
        return cls._from_content(read_json_object(path, "plan", REMEDY), f"plan {path}")

    @classmethod
    def _from_content(cls, content: dict[str, Any], source: str) -> PlacementPlan:
        if content.get("schema") != SCHEMA:
            raise OallamaError(f"{source} has schema {content.get('schema')!r}, expected {SCHEMA!r}; {REMEDY}")
        # What was not changed since it was written needs no check, which takes longer than all the rest. The hash does
        # not cover `measured`.
        if content.get("hash") != _hash(content):
            _check_schema(content, source)
        elif content.get("measured", "missing") is not None:
            _check_schema(content, source, ("measured",))
        predicted = content["predicted"]
        plan = cls(
            model=content["model"],
            planner=content["planner"],
            budgets=content["budgets"],
            context=ContextSettings(**content["context"]),
            devices=tuple(content["devices"]),
            layers=tuple(content["layers"]),
            tensors={name: TensorPlacement.read(t) for name, t in content["tensors"].items()},
            predicted=Prediction(
                devices={n: _memory(m) for n, m in predicted["devices"].items()},
                ttft_s={int(n): s for n, s in predicted["ttft_s"].items()},
                tpot_s={int(n): s for n, s in predicted["tpot_s"].items()},
                workload=(predicted["workload"][0], predicted["workload"][1]),
                request_s=predicted["request_s"],
                notes=tuple(predicted["notes"]),
                parts=predicted.get("parts", {}),
                range_s=_pair(predicted.get("range_s")),
                terms=predicted.get("terms", {}),
                learned=predicted.get("learned", {}),
                experts=ExpectedExperts.read(predicted.get("experts")),
            ),
            tied_output=content["tied_output"],
            stream_slots=content.get("stream_slots", STREAM_SLOTS),
            slot_uploads=content.get("slot_uploads", SLOT_UPLOADS),
            stream_caches=content.get("stream_caches", False),
            offline_arenas=content.get("offline_arenas", False),
            whole_layers=content.get("whole_layers", False),
            margins=content.get("margins", {}),
            measured=content["measured"],
        )
        used = {*plan.layers, *plan.budgets, *(s.device for t in plan.tensors.values() for s in t.segments)}
        if unknown := sorted(used - {*plan.devices}):
            raise OallamaError(
                f"{source} places data on unknown device {unknown[0]!r}, it lists {', '.join(plan.devices)}; {REMEDY}"
            )
        return plan


def check_model(planned: Mapping[str, Any], fingerprint: Mapping[str, Any], remedy: str) -> None:
    """Raises OallamaError unless a plan made for `planned` is for the model with this fingerprint."""
    different = [
        f"{key} {planned.get(key, 'missing')!r} against {fingerprint.get(key, 'missing')!r}"
        for key in sorted({*planned, *fingerprint})
        if planned.get(key) != fingerprint.get(key)
    ]
    if different:
        raise OallamaError(f"this plan is for another model ({'; '.join(different[:3])}); {remedy} for this model")


def _hash(content: Mapping[str, Any]) -> str:
    kept = {key: value for key, value in content.items() if key not in ("hash", "measured")}
    return hashlib.sha256(json.dumps(kept, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _check_schema(content: Mapping[str, Any], source: str, only: tuple[str, ...] = ()) -> None:
    """Raises OallamaError where the content, or `only` some of its fields, does not fit."""
    from jsonschema.exceptions import best_match

    error = best_match(_validator(only).iter_errors(content))
    if error is not None:
        at = "/".join(map(str, error.absolute_path)) or "top level"
        raise OallamaError(f"{source} does not fit the plan schema at {at}: {error.message[:200]}; {REMEDY}")


@cache
def _validator(only: tuple[str, ...]) -> jsonschema.Draft202012Validator:
    import jsonschema

    schema = json.loads(SCHEMA_FILE.read_text(encoding="utf-8"))
    if only:
        schema |= {"required": [*only], "properties": {name: schema["properties"][name] for name in only}}
        schema.pop("additionalProperties", None)
    return jsonschema.Draft202012Validator(schema)


def _pair(values: list[float] | None) -> tuple[float, float] | None:
    return None if values is None else (values[0], values[1])


def _memory(content: Mapping[str, int]) -> DeviceMemory:
    return DeviceMemory(content["weights"], content["kv"], content["compute"], content.get("pool", 0))


__all__ = [
    "HOST",
    "ContextSettings",
    "DeviceMemory",
    "Mode",
    "PlacementPlan",
    "Prediction",
    "Segment",
    "TensorPlacement",
    "is_divided_by_columns",
]
