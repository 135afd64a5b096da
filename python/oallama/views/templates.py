"""Pages and pictures from the templates beside this file; all text in them is escaped."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape
from markupsafe import Markup

_FOLDER = Path(__file__).parent / "templates"


def render(template: str, **values: Any) -> Markup:
    """The text of one of the templates; as Markup, so that another one may hold it unescaped."""
    return Markup(_environment().get_template(template).render(**values))


@cache
def _environment() -> Environment:
    return Environment(
        loader=FileSystemLoader(_FOLDER),
        autoescape=select_autoescape(("html", "svg")),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
