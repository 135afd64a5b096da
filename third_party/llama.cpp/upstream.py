#!/usr/bin/env python3
"""Fetches the pinned llama.cpp and keeps a patched copy of it; `upstream.py --help` lists the commands.

It runs before a virtual environment exists: standard library only, Python 3.10 or newer. pinned.py gets the source,
patchset.py knows the series, trees.py the folders; this file is the commands.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import tarfile
from pathlib import Path

import patchset
from patchset import Patch, PatchError
from pinned import Downloader, Layout, UpstreamError, ensure_sdist, extract, pip_download
from trees import alike, copy_tree, diff, edits, hash_file, install, lock, manifest, read_stamp, workspace

TABLE_BEGIN, TABLE_END = "<!-- table: upstream.py table --write -->", "<!-- end of table -->"


def pin_stamp(layout: Layout) -> str:
    return hash_file(layout.pin_file)


def series_stamp(layout: Layout, series: list[Patch]) -> str:
    parts = [pin_stamp(layout)] + [f"{patch.name} {hash_file(patch.path)}" for patch in series]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def build_tree(layout: Layout, series: list[Patch], tree: Path) -> Path:
    """Pristine source plus the patches of series, in a new folder."""
    copy_tree(layout.upstream, tree)
    for patch in series:
        patchset.apply(tree, patch)
    return tree


def fetch(layout: Layout, download: Downloader = pip_download) -> bool:
    """Brings upstream/ to the pin. Returns False when it was there already."""
    stamp = pin_stamp(layout)
    if read_stamp(layout.upstream)["stamp"] == stamp:
        return False
    sdist = ensure_sdist(layout, download)
    with workspace(layout.download) as work:
        extract(sdist, layout.pin(), work / "tree", work / "tests")
        tests = layout.download / "llama-cpp-python-tests"
        install(work / "tests", tests, stamp)
        install(work / "tree", layout.upstream, stamp)
    return True


def prepare(layout: Layout, *, force: bool = False, download: Downloader = pip_download) -> bool:
    """Brings patched/ to pin + series. Returns False when it was there already (no network, no upstream/ needed)."""
    series = patchset.read_series(layout.patches)
    stamp = series_stamp(layout, series)
    if read_stamp(layout.patched)["stamp"] == stamp and not force:
        return False
    with lock(layout.download):
        fetch(layout, download)
        with workspace(layout.download) as work:
            tree = build_tree(layout, series, work / "tree")
            if not force:
                refuse_to_lose_edits(layout, tree)
            install(tree, layout.patched, stamp)
    return True


def refuse_to_lose_edits(layout: Layout, tree: Path) -> None:
    """Raises UpstreamError when patched/ was edited by hand and tree, its successor, does not hold the edits."""
    if not layout.patched.exists():
        return
    if lost := [path for path in edits(layout.patched) if not alike(tree / path, layout.patched / path)]:
        raise UpstreamError(
            f"patched/ has edits that no patch holds: {', '.join(lost[:8])}{' ...' if len(lost) > 8 else ''}.\n"
            "Keep them with `upstream.py refresh NAME`, or drop them with `upstream.py prepare --force`."
        )


def check(layout: Layout) -> list[str]:
    """Everything that is wrong with the series, the headers, the table in README.md; empty when all is well."""
    series = patchset.read_series(layout.patches)
    found = [problem for patch in series for problem in patchset.problems(patch, layout.repository)]
    readme = layout.root / "README.md"
    if readme.is_file() and with_table(readme.read_text(encoding="utf-8"), table(series)) != readme.read_text("utf-8"):
        found.append("README.md: the table is stale; run: upstream.py table --write")
    with lock(layout.download):
        fetch(layout)
        with workspace(layout.download) as work:
            try:
                build_tree(layout, [patch for patch in series if patch.hunks], work / "tree")
            except PatchError as error:
                found.append(str(error))
    return found


def refresh(layout: Layout, name: str) -> Path:
    """Writes the edits made in patched/ into patch NAME, keeping its header; later patches stay as they are."""
    series = patchset.read_series(layout.patches)
    names = [patch.name for patch in series]
    name = name if name.endswith(".patch") else name + ".patch"
    if name not in names:
        raise UpstreamError(f"{name} is not in the series; write its header to patches/{name} and list it in series")
    at = names.index(name)
    with lock(layout.download), workspace(layout.download) as work:
        fetch(layout)
        before = build_tree(layout, series[:at], work / "before")
        copy_tree(layout.patched, work / "after")
        for later in reversed(series[at + 1 :]):
            patchset.apply(work / "after", later, reverse=True)
        text = diff(before, work / "after")
        if not text:
            raise UpstreamError(f"patched/ holds nothing for {name}: it equals the tree before that patch")
        made = work / name
        made.write_text(text, encoding="utf-8", newline="")
        header = patchset.with_counts(series[at].header, patchset.read_patch(made))
        made.write_text(header.rstrip("\n") + "\n\n" + text, encoding="utf-8", newline="")
        os.replace(made, series[at].path)
        series = patchset.read_series(layout.patches)
        tree = build_tree(layout, series, work / "tree")
        if manifest(tree) != manifest(layout.patched):
            raise UpstreamError(f"{name} is written, but a later patch now lands elsewhere; run: upstream.py diff")
        install(tree, layout.patched, series_stamp(layout, series))
    return layout.patches / name


def table(series: list[Patch]) -> str:
    """The patches as a markdown table, from their headers."""
    rows = ["| patch | hook | files | switch | test | drop when |", "|---|---|---|---|---|---|"]
    for patch in series:
        hook = patch.fields.get("Description", "").split("\n")[0]
        cells = [f"`{patch.name}`", hook, "<br>".join(f"`{file}`" for file in patch.files)]
        cells += [patch.fields.get(field, "").replace("\n", " ") for field in ("Switch", "Test", "Drop-when")]
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows if series else ["(no patches)"]) + "\n"


def with_table(text: str, rows: str) -> str:
    if TABLE_BEGIN not in text or TABLE_END not in text:
        raise UpstreamError(f"README.md has no lines {TABLE_BEGIN} and {TABLE_END}")
    head, rest = text.split(TABLE_BEGIN, 1)
    return head + TABLE_BEGIN + "\n" + rows + TABLE_END + rest.split(TABLE_END, 1)[1]


def status(layout: Layout) -> str:
    pin, series = layout.pin(), patchset.read_series(layout.patches)
    lines = [f"pin       {pin['package']} {pin['version']} (llama.cpp {pin['llama_cpp_commit']})"]
    wanted = {"upstream": pin_stamp(layout), "patched": series_stamp(layout, series)}
    for name, stamp in wanted.items():
        tree = layout.root / name
        made_from = read_stamp(tree)["stamp"]
        if not made_from:
            lines.append(f"{name:9} {'not made by upstream.py' if tree.exists() else 'missing'}")
            continue
        state = "up to date" if made_from == stamp else "stale"
        changed = edits(tree)
        lines.append(f"{name:9} {state}" + (f", {len(changed)} edited: {', '.join(changed[:5])}" if changed else ""))
    return "\n".join(lines + [f"patch     {patch.name}" for patch in series])


def main(argv: list[str], layout: Layout) -> int:
    parser = argparse.ArgumentParser(prog="upstream.py", description="The pinned llama.cpp and its patches.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("fetch", help="download, verify and unpack the pin into upstream/")
    commands.add_parser("sdist", help="print the path of the verified download")
    prepare_parser = commands.add_parser("prepare", help="make patched/ = upstream/ + series (no-op when it is)")
    prepare_parser.add_argument("--force", action="store_true", help="start again, dropping edits made in patched/")
    commands.add_parser("check", help="judge the series: complete, headers, size of hunks, applies without fuzz")
    refresh_parser = commands.add_parser("refresh", help="write the edits made in patched/ into a patch")
    refresh_parser.add_argument("name", help="file name of the patch, listed in patches/series")
    commands.add_parser("diff", help="show patched/ against upstream/")
    table_parser = commands.add_parser("table", help="the patches as a markdown table")
    table_parser.add_argument("--write", action="store_true", help="put it into README.md")
    commands.add_parser("status", help="what is here and whether it is up to date")
    args = parser.parse_args(argv)
    try:
        return run(args, layout)
    except (UpstreamError, PatchError, OSError, tarfile.TarError) as error:
        print(f"upstream.py: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def run(args: argparse.Namespace, layout: Layout) -> int:
    if args.command == "fetch":
        with lock(layout.download):
            done = fetch(layout)
        print(f"upstream.py: upstream/ {'fetched' if done else 'is up to date'}")
    elif args.command == "sdist":
        with lock(layout.download):
            print(ensure_sdist(layout))
    elif args.command == "prepare":
        done = prepare(layout, force=args.force)
        print(f"upstream.py: patched/ {'made anew' if done else 'is up to date'}")
    elif args.command == "check":
        found = check(layout)
        print("\n".join(found) or "upstream.py: the series is in order")
        return 1 if found else 0
    elif args.command == "refresh":
        print(f"upstream.py: wrote {refresh(layout, args.name)}")
    elif args.command == "diff":
        print(diff(layout.upstream, layout.patched), end="")
    elif args.command == "table":
        rows = table(patchset.read_series(layout.patches))
        readme = layout.root / "README.md"
        if args.write:
            readme.write_text(with_table(readme.read_text(encoding="utf-8"), rows), encoding="utf-8")
        else:
            print(rows, end="")
    else:
        print(status(layout))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], Layout(Path(__file__).resolve().parent)))
