"""What programs print: results on standard output, remarks on standard error."""

from __future__ import annotations

import codecs
import io
import json
import sys
from functools import cache
from typing import Any

# What terminals get in place of characters that they do not have.
_ASCII = {"█": "#", "▓": "%", "▒": "@", "·": ".", "»": ">", "µ": "u", "±": "+-"}


def _in_ascii(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    return "".join(_ASCII.get(c, "?") for c in error.object[error.start : error.end]), error.end


codecs.register_error("oallama", _in_ascii)


def print_in_ascii() -> None:
    """Where standard output or error is no Unicode, print what is like it instead of an error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and not stream.encoding.lower().startswith("utf"):
            stream.reconfigure(errors="oallama")


def print_json(value: Any) -> None:
    """Machine-readable output, indented."""
    print(json.dumps(value, indent=1, default=str))


def say(text: str) -> None:
    """A remark for people, on stderr."""
    print(text, file=sys.stderr)


@cache
def say_once(text: str) -> None:
    """A remark that would be the same every time."""
    say(f"oallama: {text}")


def write_text(text: str) -> None:
    """Stream model output; on a terminal without the control characters a model may invent."""
    if sys.stdout.isatty():
        text = "".join(c for c in text if c.isprintable() or c in "\n\t")
    sys.stdout.write(text)
    sys.stdout.flush()


def seconds(s: float | None) -> str:
    """A time for people; "-" for none."""
    if s is None:
        return "-"
    if s >= 1:
        return f"{s:.2f} s"
    return f"{s * 1e3:.1f} ms" if s >= 1e-3 else f"{s * 1e6:.1f} µs"


def model_name(description: str, n_params: int) -> str:
    """llama.cpp's description of a model, with its size where llama.cpp says "?B": it knows that of known models."""
    size = f"{n_params / 1e9:.3g}B" if n_params >= 1e9 else f"{n_params / 1e6:.3g}M"
    return description.replace("?B", size)
