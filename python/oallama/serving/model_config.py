"""Settings of single models behind one address: `oallama serve --hot .. --cold .. --model-config FILE.toml`.

    ["big-Q4_K_M"]             # by the name that requests use
    ctx = 16384
    parallel = 6
    threads = 3

    ["small-Q8_0"]
    plan = "small-plan.json"   # of `oallama plan -o`; relative to this file's folder

Keys are names of options without the dashes. What the file says of a model comes first, then what its plan says, then
the command line.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from oallama.data.plan import PlacementPlan
from oallama.engine.load_settings import FLASH_ATTN, KV_TYPES, Settings
from oallama.errors import OallamaError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# Key -> name in Settings, and the least number or the choices.
_SETTINGS: dict[str, tuple[str, int | Collection[str]]] = {
    "ctx": ("n_ctx", 0),
    "batch": ("n_batch", 1),
    "ubatch": ("n_ubatch", 1),
    "parallel": ("n_seq_max", 1),
    "threads": ("n_threads", 0),
    "type-k": ("type_k", KV_TYPES),
    "type-v": ("type_v", KV_TYPES),
    "flash-attn": ("flash_attn", FLASH_ATTN),
}
_PLAN = "plan"


@dataclass(frozen=True)
class ModelConfig:
    """What one model is served with in place of what holds for all; given: fields of Settings."""

    given: Mapping[str, Any] = field(default_factory=dict)
    plan: PlacementPlan | None = None

    def settings(self, of_all: Settings) -> Settings:
        """Those of the model; a plan says nothing of threads."""
        base = replace(of_all, **asdict(self.plan.context)) if self.plan else of_all
        return replace(base, **self.given)


def read_model_config(path: Path, names: Collection[str]) -> dict[str, ModelConfig]:
    """The file's settings by model. names: of the models that are served.

    Raises:
        OallamaError: the file cannot be read or is not TOML, has a model or an option that nobody knows, a value that
            does not fit its option, or a plan that cannot be read.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise OallamaError(f"{path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise OallamaError(f"{path} is not TOML: {error}") from None
    return {name: _of_model(path, name, table, names) for name, table in content.items()}


def _of_model(path: Path, name: str, table: object, names: Collection[str]) -> ModelConfig:
    if not isinstance(table, dict):
        raise OallamaError(f'{path}: {name!r} belongs to no model; write it below ["{min(names)}"], for example')
    if name not in names:
        quoted = [each for each in sorted(names) if each.startswith(f"{name}.")]
        hint = f'; write ["{quoted[0]}"]' if quoted else ""
        raise OallamaError(f"{path}: no model is called {name!r}; there are {', '.join(sorted(names))}{hint}")
    given: dict[str, Any] = {}
    for key, value in table.items():
        if key == _PLAN:
            continue
        if key not in _SETTINGS:
            near = get_close_matches(key, [*_SETTINGS, _PLAN], n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise OallamaError(f"{path}: there is no option {key!r} of {name}{hint}")
        field_name, allowed = _SETTINGS[key]
        given[field_name] = _checked(f"{path}: {key!r} of {name}", value, allowed)
    if _PLAN not in table:
        return ModelConfig(given)
    if not isinstance(table[_PLAN], str):
        raise OallamaError(f"{path}: {_PLAN!r} of {name} is a path, got {table[_PLAN]!r}")
    try:
        return ModelConfig(given, PlacementPlan.load(path.parent / Path(table[_PLAN]).expanduser()))
    except OallamaError as error:
        raise OallamaError(f"{path}: {_PLAN!r} of {name}: {error}") from None


def _checked(what: str, value: object, allowed: int | Collection[str]) -> object:
    if isinstance(allowed, int):
        if isinstance(value, bool) or not isinstance(value, int) or value < allowed:
            raise OallamaError(f"{what} is a whole number from {allowed} on, got {value!r}")
    elif not isinstance(value, str) or value not in allowed:
        raise OallamaError(f"{what} is one of {', '.join(allowed)}, got {value!r}")
    return value
