"""What a check found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "note", "missing", "broken"]


@dataclass(frozen=True)
class Finding:
    """One thing that oallama needs or can use.

    Attributes:
        name: what was looked at.
        state: "ok"; "note": it works, and could be better; "missing": something optional is not there; "broken":
            oallama cannot work, or not as it was built.
        found: what is there.
        effect: what follows from a state other than "ok"; empty else.
        remedy: the command that mends it; empty where nothing needs mending or no command does.
    """

    name: str
    state: State
    found: str
    effect: str = ""
    remedy: str = ""
