"""`oallama doctor`: what works on this machine, what is missing, and the command that mends it."""

from __future__ import annotations

from dataclasses import asdict

import typer

from oallama.base.printing import print_json
from oallama.doctor import examine
from oallama.views.doctor import render_findings

from .options import Json
from .terminal import out

BROKEN = 1


def doctor(json: Json = False) -> None:
    """Say what works on this machine, what is missing, and the command that mends it.

    Nothing is changed. Exit code 1 if something is broken.
    """
    findings = examine()
    if json:
        print_json([asdict(finding) for finding in findings])
    else:
        out.print(render_findings(findings), crop=False)  # commands are copied
    if any(finding.state == "broken" for finding in findings):
        raise typer.Exit(BROKEN)
