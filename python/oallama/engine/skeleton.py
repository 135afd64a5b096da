"""A model without its weights: its graphs, and what the allocators say of it by a dry run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from oallama.engine import load_settings, native
from oallama.engine.backend_map import backend_map
from oallama.engine.load_settings import Settings
from oallama.engine.model_file import check_gguf
from oallama.errors import OallamaError


def read_graphs(path: str | Path, settings: Settings, n_tokens: Sequence[int]) -> dict[str, Any]:
    """Operators of the real forward graph at several token counts, without loading a weight.

    Returns the raw dict `OperatorGraph.from_engine` takes. The graphs are those of a CPU-only load: which operators
    there are does not depend on the device, and no device memory is touched.

    Raises:
        OallamaError: with llama.cpp's own reason if the model cannot be loaded.
    """
    check_gguf(path)
    params = load_settings.make_params(replace(settings, devices=(), tensor_split=(), override_tensor=()))
    with _engine_errors(path):
        return dict(native.core().read_graphs(str(path), *params.addresses, list(n_tokens), settings.heads_guess))


def dry_run(path: str | Path, settings: Settings, table: str | None = None) -> dict[str, dict[str, int]]:
    """Exact bytes per device, `{device: {"weights", "kv", "compute"}}`, by the allocators' dry run under `table`.

    Raises:
        OallamaError: with llama.cpp's own reason if the model cannot be loaded.
    """
    check_gguf(path)
    params = load_settings.make_params(settings)
    with _engine_errors(path), backend_map(table):
        buffers = native.core().memory_dry_run(str(path), *params.addresses, settings.heads_guess)
    return by_device(buffers)


def read_arenas(
    path: str | Path, settings: Settings, graphs: Sequence[tuple[int, int]], table: str | None = None
) -> list[dict[str, Any]]:
    """The compute buffers of graphs, each (tokens, rows with logits), under `table`, by the allocators' dry run.

    Returns the raw dicts `planning.arenas.Arena` is made of, in the order of the graphs.

    Raises:
        OallamaError: with llama.cpp's own reason if the model cannot be loaded.
    """
    check_gguf(path)
    params = load_settings.make_params(settings)
    with _engine_errors(path), backend_map(table):
        return list(native.core().read_arenas(str(path), *params.addresses, list(graphs)))


def by_device(buffers: Sequence[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """Sum buffer types by the memory they take: host buffers of any device count as CPU."""
    result: dict[str, dict[str, int]] = {}
    for buffer in buffers:
        name = "CPU" if buffer["is_host"] or buffer["device"].startswith("CPU") else buffer["device"]
        entry = result.setdefault(name, {"weights": 0, "kv": 0, "compute": 0})
        for kind in entry:
            entry[kind] += buffer[kind]
    return result


@contextmanager
def _engine_errors(path: str | Path) -> Iterator[None]:
    try:
        yield
    except OallamaError:
        raise
    except (RuntimeError, ValueError) as err:
        raise OallamaError(f"{path}: {_reason(str(err))}") from err


def _reason(text: str) -> str:
    # llama.cpp logs from the inside out; the first error names the cause.
    lines = [line for line in text.splitlines()[1:] if line.strip()] or text.splitlines()
    return lines[0].split("error loading model: ")[-1].strip()
