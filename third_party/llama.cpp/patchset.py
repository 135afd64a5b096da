"""The series of hook patches: reading, judging and applying them (standard library only).

Invariant: a patch applies exactly as written or not at all - no fuzz, nothing skipped in silence.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

FIELDS = ("Description", "Touches", "Switch", "Test", "Drop-when")
MAX_ADDED = 10  # lines per hunk; a hook that needs more belongs into csrc/
_COUNTS = re.compile(r"\s*\(\d+ hunks?, \+\d+(, -\d+)?\)\s*$")


class PatchError(Exception):
    """A patch or the series is not as it must be; the message says what to do."""


@dataclass(frozen=True)
class Hunk:
    file: str
    start: int
    added: int
    removed: int


@dataclass(frozen=True)
class Patch:
    path: Path
    header: str
    fields: dict[str, str]
    hunks: tuple[Hunk, ...]

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def files(self) -> list[str]:
        return sorted({hunk.file for hunk in self.hunks})

    @property
    def removed(self) -> int:
        return sum(hunk.removed for hunk in self.hunks)

    @property
    def counts(self) -> str:
        """What ends the field Touches: "(3 hunks, +10, -2)"."""
        n, added = len(self.hunks), sum(hunk.added for hunk in self.hunks)
        return f"({n} hunk{'s' * (n != 1)}, +{added}{f', -{self.removed}' if self.removed else ''})"


def read_patch(path: Path) -> Patch:
    """Splits a patch into its DEP-3 header and its hunks."""
    text = path.read_bytes().decode("utf-8")  # as it is: a hunk may hold carriage returns
    start = re.search(r"^(diff --git |--- )", text, re.MULTILINE)
    header = text[: start.start()] if start else text
    hunks = _hunks(path.name, text[len(header) :].split("\n"))
    return Patch(path, header, _fields(header), tuple(hunks))


def _fields(header: str) -> dict[str, str]:
    fields: dict[str, str] = {}
    name = ""
    for line in header.splitlines():
        match = re.match(r"([A-Z][A-Za-z-]*):[ \t]*(.*)", line)
        if match:
            name = match[1]
            fields[name] = match[2].strip()
        elif name and line[:1] in (" ", "\t"):
            fields[name] = f"{fields[name]}\n{line.strip()}".strip()
    return fields


def _hunks(name: str, lines: list[str]) -> list[Hunk]:
    hunks: list[Hunk] = []
    file, old_file, i = "", "", 0
    while i < len(lines):
        line = lines[i]
        i += 1
        if line.startswith("--- "):
            old_file = line[4:].split("\t")[0]
        elif line.startswith("+++ "):
            new_file = line[4:].split("\t")[0]
            file = (old_file if new_file == "/dev/null" else new_file).split("/", 1)[-1]
        elif match := re.match(r"@@ -(\d+)(?:,(\d+))? \+\d+(?:,(\d+))? @@", line):
            # The counts, not the look of a line, say where a hunk ends: its text may contain "--- ".
            old, new = int(match[2] or 1), int(match[3] or 1)
            added = removed = 0
            while old > 0 or new > 0:
                if i == len(lines):
                    raise PatchError(f"{name}: the last hunk is cut short")
                mark = lines[i][:1]
                i += 1
                added += mark == "+"
                removed += mark == "-"
                old -= mark != "+" and mark != "\\"
                new -= mark != "-" and mark != "\\"
            hunks.append(Hunk(file, int(match[1]), added, removed))
    return hunks


def read_series(folder: Path) -> list[Patch]:
    """The patches of folder/series in order; series and *.patch files must match one to one."""
    series = folder / "series"
    if not series.is_file():
        raise PatchError(f"{series} is missing; an empty file means no patches")
    lines = (line.split("#")[0].strip() for line in series.read_text(encoding="utf-8").splitlines())
    names = [line for line in lines if line]
    present = {path.name for path in folder.glob("*.patch")}
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise PatchError(f"series lists twice: {', '.join(twice)}")
    if missing := [name for name in names if name not in present]:
        raise PatchError(f"series lists patches that do not exist: {', '.join(missing)}")
    if unlisted := sorted(present - set(names)):
        raise PatchError(f"patches that series does not list: {', '.join(unlisted)}")
    return [read_patch(folder / name) for name in names]


def problems(patch: Patch, repository: Path) -> list[str]:
    """What is wrong with a patch by the rules of README.md; empty when nothing is."""
    found = [f"header field {field}: is missing or empty" for field in FIELDS if not patch.fields.get(field)]
    if not patch.hunks:
        found.append("has no hunks; edit patched/ and run: upstream.py refresh " + patch.name)
    touches = patch.fields.get("Touches", "")
    found += [f"Touches: does not name {file}" for file in patch.files if file not in re.split(r"[\s,;]+", touches)]
    for word in re.findall(r"tests/[\w./-]+", patch.fields.get("Test", "")):
        if not (repository / word.rstrip(".")).exists():
            found.append(f"Test: names {word}, which does not exist")
    if patch.hunks and not touches.endswith(patch.counts):
        found.append(f"Touches: must end with {patch.counts}; run: upstream.py refresh {patch.name}")
    return [f"{patch.name}: {problem}" for problem in [*found, *_too_much(patch)]]


def _too_much(patch: Patch) -> list[str]:
    """Hunks that remove lines without a Reason, and those that add more lines than they may.

    A hunk adds at most MAX_ADDED lines. Beside a Reason the header may allow more: Largest-hunk is exactly the number
    of lines that the largest hunk adds.
    """
    reason, stated = patch.fields.get("Reason"), patch.fields.get("Largest-hunk")
    largest = max((hunk.added for hunk in patch.hunks), default=0)
    allowed = largest if reason and stated == str(largest) else MAX_ADDED
    found = []
    if stated is not None and stated != str(largest):
        found.append(f"Largest-hunk: is {stated}, but the largest hunk adds {largest} lines")
    for hunk in patch.hunks:
        where = f"{hunk.file}:{hunk.start}"
        if hunk.removed and not reason:
            found.append(f"{where} removes {hunk.removed} upstream lines; only add, or say why in Reason:")
        if hunk.added > allowed:
            found.append(
                f"{where} adds {hunk.added} lines, more than {allowed}; move them to csrc/, or give a Reason: and "
                f"Largest-hunk: {largest}"
            )
    return found


def with_counts(header: str, patch: Patch) -> str:
    """The header with the field Touches ending in the patch's counts."""
    lines = header.split("\n")
    first = next((i for i, line in enumerate(lines) if line.startswith("Touches:")), None)
    if first is None:
        return header
    last = first
    while last + 1 < len(lines) and lines[last + 1][:1] in (" ", "\t"):
        last += 1
    lines[last] = f"{_COUNTS.sub('', lines[last])} {patch.counts}"
    return "\n".join(lines)


def apply(tree: Path, patch: Patch, *, reverse: bool = False) -> None:
    """Applies a patch to tree without fuzz. Raises PatchError with the tool's words when it does not fit."""
    if not patch.hunks:
        raise PatchError(f"{patch.name} has no hunks; edit patched/ and run: upstream.py refresh {patch.name}")
    patch_file = str(patch.path.resolve())
    if shutil.which("git"):
        command = ["git", "apply", "--whitespace=nowarn", *["-R"] * reverse, patch_file]
    elif shutil.which("patch"):
        command = ["patch", "-p1", "--fuzz=0", "--no-backup-if-mismatch", "--batch"]
        command += ["-R" if reverse else "--forward", "-i", patch_file]
    else:
        raise PatchError("neither git nor patch is on PATH; install one of them")
    done = subprocess.run(command, cwd=tree, env=outside_git(tree), capture_output=True, text=True)
    if done.returncode:
        verb = "be taken back" if reverse else "apply"
        raise PatchError(f"{patch.name} does not {verb} without fuzz:\n{(done.stdout + done.stderr).strip()}")


def outside_git(folder: Path) -> dict[str, str]:
    """Environment in which git does not see a checkout around folder: inside one, `git apply` skips
    paths it thinks are not its own and still exits 0. A git hook's GIT_DIR would have the same effect."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    return env | {"GIT_CEILING_DIRECTORIES": str(folder.resolve().parent), "LC_ALL": "C"}
