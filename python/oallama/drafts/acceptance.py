"""How often a draft is right about its target: measured once, kept by the two files.

The target writes some text by itself, always taking the likeliest token. The draft then reads the text, and a guess is
right where its likeliest token is the one that follows. That is what greedy speculative decoding accepts, at every
position, and it needs one model at a time.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Literal

from ..base.json_child import JsonChild
from ..base.jsonfile import read_json_object, write_text_atomic
from ..data.plan import PlacementPlan
from ..errors import OallamaError
from ..profiling.recorder import cache_dir

ASSUMED = 0.6  # of a draft of the target's own family, on text at large; said wherever it is used
PROGRAM = "oallama.drafts.guesses"
LIMIT_S = 1800.0
# What is written to count guesses in.
N_EACH = 32  # tokens written behind each prompt
LEAST, MOST_S = 24, 20.0  # tokens that are enough when the target is slow
PROMPTS = (
    "Once upon a time there was a little",
    "The capital of France is Paris. The capital of Italy is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "Question: Why is the sky blue?\nAnswer:",
)


@dataclass(frozen=True)
class Acceptance:
    """rate: probability that a guess is right, 0 to 1. n_tokens: guesses that were counted."""

    rate: float
    source: Literal["measured", "given", "assumed"] = "assumed"
    n_tokens: int = 0
    created: str = ""

    def __str__(self) -> str:
        how = f"measured over {self.n_tokens} tokens" if self.source == "measured" else self.source
        return f"{self.rate:.0%} of guesses right, {how}"


def known(target: Path, draft: Path | None) -> Acceptance | None:
    """What was measured for these two files, if it was; without a draft for the target's own MTP heads."""
    file = _file(target, draft)
    if file.is_file():
        with suppress(OallamaError, TypeError, KeyError):  # damaged, or of another version: measured again
            found = Acceptance(**read_json_object(file, "acceptance", "it is measured again")["acceptance"])
            if found.source == "measured" and 0 <= found.rate <= 1:
                return found
    return None


def measure(
    target: Path, draft: Path, plan: PlacementPlan, rpc_servers: Sequence[str] = (), n_threads: int = 0
) -> Acceptance:
    """Run the target under its plan and then the draft on the CPU, in a process of their own; keep what was found.

    rpc_servers: HOST:PORT in the order that gave their devices the names the plan uses.

    Raises:
        OallamaError: when a model cannot be loaded or run, with the reason.
    """
    job = {"target": str(target), "draft": str(draft), "plan": plan.to_json()}
    with JsonChild([sys.executable, "-m", PROGRAM]) as child:
        child.tell(job | {"rpc_servers": list(rpc_servers), "n_threads": n_threads})
        said = child.hear(LIMIT_S)
        if said is None or "error" in said:
            why = child.last_words() if said is None else said["error"]
            raise OallamaError(f"the guesses of {draft.name} could not be counted: {why}; give --acceptance, or none")
    return keep(target, draft, said["n_right"] / said["n_tokens"], said["n_tokens"])


def keep(target: Path, draft: Path | None, rate: float, n_tokens: int) -> Acceptance:
    """What was measured now, kept for `known`."""
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    found = Acceptance(rate, "measured", n_tokens, now)
    with suppress(OallamaError):  # a cache that cannot be written: measured again next time
        files = {"target": str(target), "draft": str(draft) if draft else None}
        text = json.dumps({**files, "acceptance": asdict(found)}, indent=1)
        write_text_atomic(_file(target, draft), text + "\n", "acceptance")
    return found


def _file(target: Path, draft: Path | None) -> Path:
    """Files are told apart as plans do it: by path, size and time."""
    paths = (target, draft) if draft else (target,)
    marks = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    digest = hashlib.sha256(json.dumps(marks).encode()).hexdigest()[:12]
    return cache_dir() / "acceptance" / f"{target.stem}-by-{draft.stem if draft else 'its-heads'}-{digest}.json"
