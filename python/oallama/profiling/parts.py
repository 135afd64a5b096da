"""Parts of datasheets: dataclasses from JSON objects, with what is wrong named by its place. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Part = TypeVar("Part", bound="DataclassInstance")
# Zero says that a number is not known or not used.
_MAY_BE_ZERO = {"memory_bytes", "ghz", "fp32_gflops", "overhead_s", "launch_s", "latency_s", "switch_s"}


def build_part(kind: type[Part], row: Mapping[str, Any], where: str) -> Part:
    """One part of a datasheet. Raises ValueError naming the field that is unknown, missing or not possible."""
    if not isinstance(row, Mapping):
        raise ValueError(f"{where} is {row!r}, expected an object")
    known: dict[str, Field[Any]] = {f.name: f for f in fields(kind)}
    if unknown := sorted({*row} - {*known}):
        raise ValueError(f"{where}.{unknown[0]} is not known, expected some of {', '.join(known)}")
    needed = [name for name, f in known.items() if f.default is MISSING and f.default_factory is MISSING]
    if missing := [name for name in needed if name not in row]:
        raise ValueError(f"{where} has no {missing[0]}")
    for name, value in row.items():
        _check(f"{where}.{name}", str(known[name].type), value, may_be_zero=name in _MAY_BE_ZERO)
    return kind(**row)


def _check(where: str, kind: str, value: Any, may_be_zero: bool) -> None:
    if kind == "str" and not isinstance(value, str):
        raise ValueError(f"{where} is {value!r}, expected a text")
    if kind == "bool" and not isinstance(value, bool):
        raise ValueError(f"{where} is {value!r}, expected true or false")
    if kind not in ("int", "float"):
        return
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not number or value < 0 or (value == 0 and not may_be_zero):
        raise ValueError(f"{where} is {value!r}, expected a number above 0")
    if where.endswith("_efficiency") and value > 1:
        raise ValueError(f"{where} is {value!r}, expected a share of the peak: at most 1")
    if kind == "int" and value != int(value):
        raise ValueError(f"{where} is {value!r}, expected a whole number")
