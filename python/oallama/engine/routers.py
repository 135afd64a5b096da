"""What a model's routing is known by: its routers' weights, in the file. Quantising a model leaves them as they are."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from oallama.data.routing import Routers
from oallama.engine import native
from oallama.engine.model_file import check_gguf
from oallama.errors import OallamaError

# Router, its bias, the bias of the choice, and tables of fixed choices.
_ROUTER = re.compile(r"blk\.\d+\.(ffn_gate_inp|exp_probs_b|ffn_gate_tid2eid)(\.|$)")
_PART = re.compile(r"-\d{5}-of-(\d{5})\.gguf$")
_READ = 1 << 16  # bytes of each tensor that are looked at: training changes all of them


def routers_of(path: str | Path) -> Routers | None:
    """The routers of a model file, or of all its parts; None for a dense model.

    Raises:
        OallamaError: for a file that is missing, cut off, or no GGUF.
    """
    digest, arch, n_experts = hashlib.sha256(), "", 0
    for file in _parts(check_gguf(path)):
        outline = _outline(file)
        arch = arch or outline["arch"]
        with file.open("rb") as content:
            for name, ne, offset, nbytes in sorted(t for t in outline["tensors"] if _ROUTER.match(t[0])):
                content.seek(offset)
                data = content.read(min(nbytes, _READ))
                if len(data) < min(nbytes, _READ):
                    raise OallamaError(f"{file} is cut off: it ends before {name}; copy or download it again")
                digest.update(f"{name} {ne}\n".encode() + data)
                n_experts = max(n_experts, ne[-1] if name.endswith("ffn_gate_inp.weight") else 0)
    return Routers(arch, n_experts, digest.hexdigest()) if n_experts else None


def _outline(file: Path) -> dict[str, Any]:
    try:
        return dict(native.core().tensor_places(str(file)))
    except ValueError as error:
        raise OallamaError(str(error)) from None


def _parts(path: Path) -> Iterator[Path]:
    """All files of the model that the first one belongs to."""
    found = _PART.search(path.name)
    if found is None or _outline(path)["n_parts"] < 2:
        yield path
        return
    for number in range(1, int(found[1]) + 1):
        yield check_gguf(path.with_name(f"{path.name[: found.start()]}-{number:05d}-of-{found[1]}.gguf"))
