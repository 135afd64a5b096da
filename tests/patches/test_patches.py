"""The pin and the patch series: the tool that applies them, on small made-up trees, and the real series."""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
from pathlib import Path

import patchset
import pinned
import pytest
import trees
import upstream

from support.paths import ROOT

LLAMA_CPP = ROOT / "third_party" / "llama.cpp"

SOURCE = "".join(f"line {i}\n" for i in range(1, 31))
HEADER = "Description: call oa_hook\nTouches: src/a.c (1 hunk, +1)\nSwitch: OALLAMA_X\nTest: none\nDrop-when: never\n"
REASON = "Reason: no other place\n"
OLD = 1_000_000_000  # a time of change in the past


def hook_patch(header: str = HEADER, context: str = "line 10", added: tuple[str, ...] = ("oa_hook();",)) -> str:
    header = header.replace("+1)", f"+{len(added)})")
    body = "".join(f"+{line}\n" for line in added)
    hunk = f"@@ -9,4 +9,{4 + len(added)} @@\n line 9\n {context}\n{body} line 11\n line 12\n"
    return f"{header}\n--- a/src/a.c\n+++ b/src/a.c\n{hunk}"


def make_sdist(path: Path, files: dict[str, str]) -> str:
    with tarfile.open(path, "w:gz") as tar:
        for name, text in files.items():
            member = tarfile.TarInfo(f"pkg-1/{name}")
            member.size = len(text)
            tar.addfile(member, io.BytesIO(text.encode()))
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def layout(tmp_path: Path) -> pinned.Layout:
    """A checkout with a tiny pinned source and one good patch."""
    root = tmp_path / "third_party" / "llama.cpp"
    layout = pinned.Layout(root)
    layout.patches.mkdir(parents=True)
    layout.download.mkdir()
    files = {"vendor/x/src/a.c": SOURCE, "vendor/x/src/b.c": "b\n", "vendor/x/docs/no.md": "", "tests/test_x.py": ""}
    digest = make_sdist(layout.download / "pkg-1.tar.gz", files)
    pin = {"package": "pkg", "version": "1", "sdist": "pkg-1.tar.gz", "sha256": digest, "llama_cpp_commit": "0"}
    pin |= {"path": "vendor/x", "extract": ["src"], "exclude": [], "package_tests": "tests", "package_python": []}
    layout.pin_file.write_text(json.dumps(pin))
    set_series(layout, {"0001-hook.patch": hook_patch()})
    return layout


def set_series(layout: pinned.Layout, patches: dict[str, str]) -> None:
    for old in layout.patches.glob("*.patch"):
        old.unlink()
    for name, text in patches.items():
        (layout.patches / name).write_text(text)
    (layout.patches / "series").write_text("# order\n" + "".join(f"{name}\n" for name in patches))


def offline(pin: dict, folder: Path) -> None:
    raise pinned.UpstreamError("no index")


def test_prepare_extracts_and_patches_only_what_is_asked_for(layout):
    assert upstream.prepare(layout)
    assert trees.files_of(layout.upstream) == ["src/a.c", "src/b.c"]
    assert (layout.upstream / "src/a.c").read_text() == SOURCE
    assert (layout.patched / "src/a.c").read_text() == SOURCE.replace("line 10\n", "line 10\noa_hook();\n")
    assert (layout.download / "llama-cpp-python-tests" / "test_x.py").is_file()
    assert not list(layout.download.glob("work-*"))


def test_prepare_is_idempotent_and_needs_nothing_when_stamped(layout):
    upstream.prepare(layout)
    for path in (layout.download / "pkg-1.tar.gz", layout.upstream / trees.STAMP):
        path.unlink()  # as in a source distribution of ours: patched/ alone
    before = (layout.patched / "src/a.c").stat().st_mtime_ns
    assert not upstream.prepare(layout, download=offline)
    assert (layout.patched / "src/a.c").stat().st_mtime_ns == before


def test_prepare_keeps_the_times_of_unchanged_files(layout):
    upstream.prepare(layout)
    for name in ("a.c", "b.c"):
        os.utime(layout.patched / "src" / name, (OLD, OLD))
    set_series(layout, {"0001-hook.patch": hook_patch(added=("oa_other();",))})
    assert upstream.prepare(layout)
    assert "oa_other" in (layout.patched / "src/a.c").read_text()
    assert (layout.patched / "src/b.c").stat().st_mtime == OLD
    assert (layout.patched / "src/a.c").stat().st_mtime > OLD


def test_leaving_a_patch_out_restores_the_pristine_file_and_drops_new_ones(layout):
    new_file = "--- /dev/null\n+++ b/new/c.c\n@@ -0,0 +1 @@\n+c\n"
    set_series(layout, {"0001-hook.patch": hook_patch(), "0002-new.patch": HEADER + "\n" + new_file})
    upstream.prepare(layout)
    assert (layout.patched / "new/c.c").read_text() == "c\n"
    set_series(layout, {})
    upstream.prepare(layout)
    assert trees.manifest(layout.patched) == trees.manifest(layout.upstream)
    assert not (layout.patched / "new").exists()


def test_stamp_depends_on_pin_order_and_text(layout):
    def stamp() -> str:
        return upstream.series_stamp(layout, patchset.read_series(layout.patches))

    set_series(layout, {"0001-a.patch": hook_patch(), "0002-b.patch": hook_patch(context="line 10")})
    stamps = {stamp()}
    (layout.patches / "series").write_text("0002-b.patch\n0001-a.patch\n")
    stamps.add(stamp())
    (layout.patches / "0001-a.patch").write_text(hook_patch(added=("x();",)))
    stamps.add(stamp())
    layout.pin_file.write_text(layout.pin_file.read_text() + "\n")
    stamps.add(stamp())
    assert len(stamps) == 4


def test_interrupted_install_is_not_taken_for_a_whole_tree(layout, monkeypatch):
    upstream.prepare(layout)
    set_series(layout, {"0001-hook.patch": hook_patch(added=("oa_other();",))})
    monkeypatch.setattr(trees, "copy_file", _interrupt_below(layout.patched, trees.copy_file))
    with pytest.raises(KeyboardInterrupt):
        upstream.prepare(layout)
    assert trees.read_stamp(layout.patched)["stamp"] == trees.INCOMPLETE
    monkeypatch.undo()
    assert upstream.prepare(layout)
    assert "oa_other" in (layout.patched / "src/a.c").read_text()


def _interrupt_below(folder: Path, copy):
    def copy_or_stop(source: Path, target: Path) -> None:
        if target.is_relative_to(folder):
            raise KeyboardInterrupt
        copy(source, target)

    return copy_or_stop


def test_hash_mismatch_is_refused_and_deleted(layout):
    sdist = layout.download / "pkg-1.tar.gz"
    sdist.write_bytes(sdist.read_bytes() + b"x")
    with pytest.raises(pinned.UpstreamError, match=r"not the pinned file, deleted: sha256 is .* expected"):
        upstream.prepare(layout)
    assert not sdist.exists()
    assert not layout.upstream.exists()


def test_offline_without_download_says_what_is_expected(layout):
    (layout.download / "pkg-1.tar.gz").unlink()
    with pytest.raises(pinned.UpstreamError, match=r"no network and no download; expected .*pkg-1\.tar\.gz"):
        upstream.prepare(layout, download=offline)


@pytest.mark.parametrize("name", ["vendor/x/src/../../../../evil", "vendor/x/src/link"])
def test_extraction_refuses_links_and_paths_that_leave_the_tree(layout, name):
    sdist = layout.download / "evil.tar.gz"
    with tarfile.open(sdist, "w:gz") as tar:
        member = tarfile.TarInfo(f"pkg-1/{name}")
        if name.endswith("link"):
            member.type, member.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(member)
    with pytest.raises(pinned.UpstreamError, match="not a plain file"):
        pinned.extract(sdist, layout.pin(), layout.root / "tree", layout.root / "tests")


def test_extraction_misses_nothing_in_silence(layout):
    pin = layout.pin() | {"extract": ["src", "gone.txt"]}
    with pytest.raises(pinned.UpstreamError, match=r"does not hold: gone\.txt"):
        pinned.extract(layout.download / "pkg-1.tar.gz", pin, layout.root / "tree", layout.root / "tests")


@pytest.mark.parametrize("tool", ["git", "patch"])
def test_a_patch_that_fits_only_with_fuzz_is_refused(layout, tool, monkeypatch):
    found = patchset.shutil.which(tool)
    if not found:
        pytest.skip(f"{tool} is not installed")
    monkeypatch.setattr(patchset.shutil, "which", lambda name: found if name == tool else None)
    upstream.prepare(layout)
    set_series(layout, {"0001-hook.patch": hook_patch().replace(" line 9\n", " line nine\n")})
    with pytest.raises(patchset.PatchError, match=r"0001-hook\.patch does not apply without fuzz"):
        upstream.prepare(layout)
    assert "0001-hook.patch does not apply without fuzz" in "".join(upstream.check(layout))
    assert "oa_hook" in (layout.patched / "src/a.c").read_text(), "the tree of before must survive"


def test_patches_apply_inside_a_git_checkout(layout, monkeypatch):
    """There `git apply` would skip every path and exit 0; a git hook's environment must not matter either."""
    repository = layout.repository
    assert os.system(f"git init -q '{repository}'") == 0
    monkeypatch.setenv("GIT_DIR", str(repository / ".git"))
    upstream.prepare(layout)
    assert "oa_hook" in (layout.patched / "src/a.c").read_text()


def test_edits_by_hand_are_not_lost(layout):
    upstream.prepare(layout)
    (layout.patched / "src/b.c").write_text("mine\n")
    assert not upstream.prepare(layout)
    set_series(layout, {})
    with pytest.raises(pinned.UpstreamError, match=r"edits that no patch holds: src/b\.c"):
        upstream.prepare(layout)
    assert (layout.patched / "src/b.c").read_text() == "mine\n"
    assert upstream.prepare(layout, force=True)
    assert (layout.patched / "src/b.c").read_text() == "b\n"


def test_refresh_writes_a_new_patch_from_edits(layout):
    upstream.prepare(layout)
    (layout.patches / "0002-b.patch").write_text(HEADER.replace("a.c", "b.c"))
    (layout.patches / "series").write_text("0001-hook.patch\n0002-b.patch\n")
    (layout.patched / "src/b.c").write_text("b\noa_b();\n")
    upstream.refresh(layout, "0002-b")
    patch = patchset.read_patch(layout.patches / "0002-b.patch")
    assert patch.files == ["src/b.c"] and patch.fields["Switch"] == "OALLAMA_X"
    assert not upstream.prepare(layout), "patched/ is what the series makes"
    assert upstream.check(layout) == []


def test_refresh_of_an_earlier_patch_leaves_later_ones_alone(layout):
    later = hook_patch(context="oa_hook();", added=("oa_later();",)).replace(" line 9\n", " line 10\n")
    set_series(layout, {"0001-hook.patch": hook_patch(), "0002-later.patch": later})
    upstream.prepare(layout)
    source = layout.patched / "src/a.c"
    source.write_text(source.read_text().replace("line 20\n", "line 20\noa_more();\n"))
    upstream.refresh(layout, "0001-hook.patch")
    assert (layout.patches / "0002-later.patch").read_text() == later
    assert "oa_more" in (layout.patches / "0001-hook.patch").read_text()
    assert upstream.check(layout) == []


@pytest.mark.parametrize("field", patchset.FIELDS)
@pytest.mark.parametrize("empty", [True, False])
def test_missing_or_empty_header_field_is_refused(layout, field, empty):
    lines = [line for line in HEADER.splitlines() if empty or not line.startswith(field)]
    header = "\n".join(f"{field}:" if line.startswith(field) else line for line in lines)
    set_series(layout, {"0001-hook.patch": hook_patch(header + "\n")})
    assert f"0001-hook.patch: header field {field}: is missing or empty" in upstream.check(layout)


@pytest.mark.parametrize(
    "change, expected",
    [
        ({"added": tuple(f"x{i};" for i in range(11))}, "adds 11 lines"),
        ({"added": ()}, None),
        ({"header": HEADER.replace("src/a.c", "src/b.c")}, "Touches: does not name src/a.c"),
        ({"header": HEADER.replace("none", "tests/test_gone.py")}, "names tests/test_gone.py, which does not exist"),
    ],
)
def test_rules(layout, change, expected):
    set_series(layout, {"0001-hook.patch": hook_patch(**change)})
    found = patchset.problems(patchset.read_series(layout.patches)[0], layout.repository)
    assert [expected in problem for problem in found] == ([True] if expected else [])


def test_removing_lines_needs_a_reason(layout):
    text = hook_patch().replace(" line 10\n", "-line 10\n").replace("+9,5", "+9,4").replace("+1)", "+1, -1)")
    set_series(layout, {"0001-hook.patch": text})
    assert "removes 1 upstream lines" in "".join(upstream.check(layout))
    set_series(layout, {"0001-hook.patch": text.replace("Drop-when", f"{REASON}Drop-when")})
    assert upstream.check(layout) == []


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (REASON, "adds 12 lines, more than 10"),
        ("Largest-hunk: 12\n", "adds 12 lines, more than 10"),
        (REASON + "Largest-hunk: 12\n", None),
        (REASON + "Largest-hunk: 13\n", "Largest-hunk: is 13, but the largest hunk adds 12 lines"),
    ],
)
def test_a_reason_does_not_lift_the_limit_of_a_hunk(layout, more, expected):
    header = HEADER.replace("Drop-when", f"{more}Drop-when")
    set_series(layout, {"0001-hook.patch": hook_patch(header, added=tuple(f"x{i};" for i in range(12)))})
    found = patchset.problems(patchset.read_series(layout.patches)[0], layout.repository)
    assert expected in "".join(found) if expected else not found


@pytest.mark.parametrize("wrong", ["", " (2 hunks, +1)", " (1 hunk, +2)", " (1 hunk, +1, -1)"])
def test_the_counts_of_the_header_are_those_of_the_hunks(layout, wrong):
    set_series(layout, {"0001-hook.patch": hook_patch().replace(" (1 hunk, +1)", wrong)})
    assert upstream.check(layout) == [
        "0001-hook.patch: Touches: must end with (1 hunk, +1); run: upstream.py refresh 0001-hook.patch"
    ]
    upstream.prepare(layout)
    upstream.refresh(layout, "0001-hook.patch")
    assert upstream.check(layout) == []


@pytest.mark.parametrize(
    "series, message",
    [
        ("", "series does not list: 0001-hook.patch"),
        ("0001-hook.patch\n0002-b.patch\n", "do not exist: 0002-b.patch"),
        ("0001-hook.patch\n0001-hook.patch\n", "lists twice: 0001-hook.patch"),
    ],
)
def test_series_and_files_must_match(layout, series, message):
    (layout.patches / "series").write_text(series)
    with pytest.raises(patchset.PatchError, match=message):
        upstream.check(layout)


def test_hunks_are_counted_not_guessed(tmp_path):
    path = tmp_path / "x.patch"
    path.write_text(HEADER + "\n--- a/src/a.c\n+++ b/src/a.c\n@@ -1 +1,2 @@\n line 1\n+++ b/not/a/file\n")
    assert patchset.read_patch(path).hunks == (patchset.Hunk("src/a.c", 1, 1, 0),)
    path.write_text(path.read_text().replace("+1,2 @@", "+1,3 @@").rstrip("\n"))
    with pytest.raises(patchset.PatchError, match="cut short"):
        patchset.read_patch(path)


def test_table_in_readme_must_be_fresh(layout, capsys):
    readme = layout.root / "README.md"
    readme.write_text(f"# x\n{upstream.TABLE_BEGIN}\nold\n{upstream.TABLE_END}\nend\n")
    assert upstream.main(["check"], layout) == 1
    assert "the table is stale" in capsys.readouterr().out
    assert upstream.main(["table", "--write"], layout) == 0
    assert "| `0001-hook.patch` | call oa_hook | `src/a.c` | OALLAMA_X | none | never |" in readme.read_text()
    assert upstream.main(["check"], layout) == 0


def test_user_errors_are_one_message_and_exit_code_2(layout, capsys):
    assert upstream.main(["refresh", "0007-none"], layout) == 2
    assert "0007-none.patch is not in the series" in capsys.readouterr().err
    (layout.patches / "series").unlink()
    assert upstream.main(["prepare"], layout) == 2
    assert "an empty file means no patches" in capsys.readouterr().err


def test_the_real_series_is_in_order():
    layout = pinned.Layout(LLAMA_CPP)
    if trees.read_stamp(layout.upstream)["files"] and trees.edits(layout.upstream):
        pytest.skip("upstream/ is trimmed (a bundle): patches to the backends left out cannot be tried")
    assert upstream.check(layout) == []


def test_no_header_is_patched_that_engine_and_baseline_compile_with():
    """Every file that includes it would be compiled for the baseline again, in place of taken from ccache."""
    files = {file for patch in patchset.read_series(LLAMA_CPP / "patches") for file in patch.files}
    folders = ("src/", "ggml/", "include/")
    assert not [file for file in files if file.startswith(folders) and file.endswith((".h", ".cuh"))]
