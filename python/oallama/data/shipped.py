"""Files that come with oallama and are taken by name: datasheets/NAME.json and recorded/NAME.json."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import OallamaError

HERE = Path(__file__).parent


def find(source: str | os.PathLike[str], folder: Path, what: str) -> Path:
    """`source` itself if it is a file or looks like one (has a suffix); else the shipped file of that name.

    Raises OallamaError listing the names there are. `what` is the word for it in messages.
    """
    path = Path(source)
    if path.suffix or path.exists():
        return path
    names = sorted(p.stem for p in folder.glob("*.json"))
    if str(source) not in names:
        raise OallamaError(
            f"no {what} is called {str(source)!r}: take one of {', '.join(names)}, or the path of a file"
        )
    return folder / f"{source}.json"
