"""The fastest ways of a cluster plan, tried: each runs the request once, as it would run for its user."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from oallama.base.children import OALLAMA, die_with_parent
from oallama.errors import OallamaError

from ..allocation.candidates import Candidate
from ..allocation.cluster_plan import ClusterPlan
from ..pipeline.dialogue import Progress
from .choose import plan_of

NEAR = 1.5  # ways that are predicted to take more than this times the fastest are not tried
TIMEOUT_S = 3600.0


def measured(
    model: Path, plan: ClusterPlan, candidates: Sequence[Candidate], agent: str | None, progress: Progress
) -> list[Candidate]:
    """All candidates, with the times of those that were tried: this host alone, and what is predicted near the fastest.

    One that fails is none any more.
    """
    seconds = {c.name: s for c in candidates if (s := c.predicted_s(plan.request)) is not None}
    limit = NEAR * min(seconds.values(), default=0.0)
    tried = [c for c in candidates if c.name in seconds and (c.way == "here" or seconds[c.name] <= limit)]
    found = {}
    for at, candidate in enumerate(tried):
        progress(at, len(tried), candidate.name)
        found[candidate.name] = _tried(model, plan, candidate, agent)
    return [found.get(c.name, c) for c in candidates]


def run_once(model: Path, plan: ClusterPlan, agent: str | None) -> dict[str, Any]:
    """What `oallama cluster run --plan --json` says of the plan's request. Raises OallamaError when it fails."""
    request = plan.request
    prompt = " ".join(["the"] * max(1, request.n_prompt - 1))
    with tempfile.TemporaryDirectory(prefix="oallama-") as folder:
        file = Path(folder) / "plan.json"
        plan.save(file)
        command = [*OALLAMA, "cluster", "run", str(model), prompt, "--plan", str(file), "--json"]
        command += ["--n-generate", str(request.n_generate), "--temperature", "0", "--threshold", "1000"]
        command += ["--ssh-agent", agent] if agent else []
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
                stdin=subprocess.DEVNULL,
                preexec_fn=die_with_parent,
            )
        except subprocess.TimeoutExpired:
            raise OallamaError(f"it did not end within {TIMEOUT_S:g} s") from None
    if done.returncode:
        raise OallamaError((done.stderr.strip().splitlines() or ["it says nothing"])[-1].removeprefix("error: "))
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def _tried(model: Path, plan: ClusterPlan, candidate: Candidate, agent: str | None) -> Candidate:
    try:
        said = run_once(model, plan_of(plan, candidate), agent)
    except OallamaError as error:
        return replace(candidate, ttft_s=None, tpot_s=None, why_not=f"tried: {error}")
    return replace(candidate, measured_ttft_s=said["ttft_s"], measured_tpot_s=said["tpot_s"] or 0.0)
