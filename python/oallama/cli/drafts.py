"""`--draft` and `--heads` of `plan` and `serve`: a model and what guesses for it planned together."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from oallama.base.printing import say
from oallama.drafts import Acceptance, Joint, known, measure, plan_jointly, plan_with_heads
from oallama.drafts.acceptance import ASSUMED
from oallama.engine.load_settings import Settings
from oallama.errors import OallamaError
from oallama.loading.autoplan import Choices
from oallama.serving.head_acceptance import measure_heads
from oallama.views.drafts import render_drafts
from oallama.views.plan_table import render_plan

from .options import Connection, Drafts
from .terminal import err, out, progress_bar, warn_if_busy


def plan_pair(
    model: Path,
    drafts: Drafts,
    vram: str | None,
    wanted: Settings,
    choices: Choices,
    connection: Connection,
    measures: bool,
) -> Joint:
    """measures: count right guesses where nobody did, under the plan without a draft; else a share is assumed."""
    given = None if drafts.acceptance is None else Acceptance(drafts.acceptance, "given")
    with progress_bar("profiling") as report:
        asked = (vram, wanted, choices, Acceptance(ASSUMED), drafts.draft_max, report)
        joint = plan_jointly(model, drafts.draft, *asked) if drafts.draft else plan_with_heads(model, *asked)
    if found := given or known(model, drafts.draft):
        return joint.with_acceptance(found)
    if not measures or not joint.held:
        return joint
    warn_if_busy()
    say(f"counting how often {joint.guesser} is right about {model.name}: once")
    if drafts.draft is None:
        guessing = next(choice for choice in joint.choices if choice.n)
        longest = max(choice.n for choice in joint.choices)
        plan = joint.targets[guessing.pair]
        return joint.with_acceptance(measure_heads(model, plan, longest, connection.endpoints, wanted.n_threads))
    plain = next(joint.targets[choice.pair] for choice in joint.choices if not choice.n)
    return joint.with_acceptance(measure(model, drafts.draft, plain, connection.endpoints, wanted.n_threads))


def refuse_what_shows_one_model(printed: str, given: Mapping[str, object], option: str) -> None:
    """Raises OallamaError for ways to show a plan that have no room for what guesses. given: options and values."""
    for name, value in given.items():
        if value:
            raise OallamaError(f"{name} shows one model; plan it without {option}")
    if printed not in ("table", "json"):
        raise OallamaError(f"--format {printed} is for one model; with {option} take table or json")


def show_pair(joint: Joint, printed: str, explain: bool, output: Path | None) -> None:
    """As `oallama plan` shows one plan; a chosen draft's plan is written beside the target's."""
    if explain:
        (out if printed == "table" else err).print(render_drafts(joint))
    written = []
    if output:
        joint.plan.save(output)
        written.append(output)
        if joint.draft_plan:
            written.append(output.with_suffix(".draft.json"))
            joint.draft_plan.save(written[-1])
    if printed == "json":
        plans = (joint.plan, joint.draft_plan)
        target, draft = (json.loads(plan.to_json()) if plan else None for plan in plans)
        print(json.dumps({**joint.to_dict(), "plan": target, "draft_plan": draft}, indent=1))
        return
    out.print(render_plan(joint.plan))
    out.print(joint.describe(), soft_wrap=True)
    if written:
        out.print(f"written to {' and '.join(map(str, written))}", soft_wrap=True)
