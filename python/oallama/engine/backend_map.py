"""The table that loads of this thread obey."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from oallama.engine import native
from oallama.errors import OallamaError


@contextmanager
def backend_map(table: str | None) -> Iterator[None]:
    """Let the loads of this thread obey `table` (None: upstream's rules) inside the block.

    Raises:
        OallamaError: for a malformed table, or if a load inside the block was refused by it.
    """
    if table is None:
        yield
        return
    try:
        native.core().set_backend_map(table)
    except ValueError as err:
        raise OallamaError(str(err)) from err
    try:
        yield
    except (ValueError, RuntimeError) as err:
        refusal = native.core().backend_map_error()
        if refusal:
            raise OallamaError(refusal) from err
        raise
    finally:
        native.core().clear_backend_map()
