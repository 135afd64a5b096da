"""Option groups: a dataclass of options that several commands share, taken by a command as one argument."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from functools import wraps
from typing import Any, TypeVar, get_type_hints

Result = TypeVar("Result")


def grouped(function: Callable[..., Result]) -> Callable[..., Result]:
    """A command for typer: each parameter that is annotated with a dataclass becomes one option per field.

    Fields are annotated as options are, and need defaults. Options come in the order of parameters and fields.
    """
    groups: dict[str, Any] = {}
    parameters = []
    hints = get_type_hints(function, include_extras=True)
    for parameter in inspect.signature(function).parameters.values():
        annotation = hints[parameter.name]
        if not is_dataclass(annotation):
            parameters.append(parameter.replace(annotation=annotation))
            continue
        groups[parameter.name] = annotation
        inner = get_type_hints(annotation, include_extras=True)
        for field in fields(annotation):
            assert field.default is not MISSING, f"{field.name} needs a default"
            kind = inspect.Parameter.KEYWORD_ONLY
            parameters.append(inspect.Parameter(field.name, kind, default=field.default, annotation=inner[field.name]))

    @wraps(function)
    def command(**values: Any) -> Result:
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
        return function(**values)

    del command.__wrapped__  # type: ignore[attr-defined]  # typer would look for hints there
    by_keyword = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
    command.__signature__ = inspect.Signature(by_keyword)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    return command
