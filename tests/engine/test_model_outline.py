"""Dry runs read an outline of the model file, without vocabulary and weights. test_memory.py holds what they answer."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import pytest

from oallama import OallamaError
from oallama.engine import skeleton
from oallama.engine.load_settings import Settings
from oallama.loading import autoplan
from oallama.modelmaker import make_model

SETTINGS = Settings(n_ctx=512)
N_VOCAB = 151_936


@pytest.fixture(scope="module")
def wordy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("wordy") / "m.gguf"
    make_model(path, arch="qwen2", shape="tiny", overrides={"n_vocab": N_VOCAB})
    return path


def bytes_read(path: Path) -> int:
    """By one dry run of this process, by its system calls."""

    def so_far() -> int:
        return int(Path("/proc/self/io").read_text().split("rchar: ")[1].split()[0])

    before = so_far()
    skeleton.dry_run(path, SETTINGS)
    return so_far() - before


def test_the_vocabulary_is_read_once(wordy: Path) -> None:
    first = bytes_read(wordy)
    assert bytes_read(wordy) < first / 10


def test_without_the_vocabulary_its_size_is_known(wordy: Path, tmp_path: Path) -> None:
    """Also of a file that does not tell it."""
    silent = tmp_path / "silent.gguf"
    content = wordy.read_bytes()
    assert content.count(b"qwen2.vocab_size") == 1
    silent.write_bytes(content.replace(b"qwen2.vocab_size", b"qwen2.vocab_none"))
    for path in (wordy, silent):
        assert autoplan.read_graph(path, SETTINGS).tensor["token_embd.weight"].ne[1] == N_VOCAB
        assert skeleton.dry_run(path, SETTINGS) == skeleton.dry_run(wordy, SETTINGS)


def test_a_file_that_is_written_anew_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    sizes = set()
    for n_layer in (2, 4):
        make_model(path, arch="llama", shape="tiny", overrides={"n_layer": n_layer})
        sizes.add(sum(device["kv"] for device in skeleton.dry_run(path, SETTINGS).values()))
    assert len(sizes) == 2


def test_a_file_that_ends_early_is_refused(wordy: Path, tmp_path: Path) -> None:
    short = tmp_path / "short.gguf"
    short.write_bytes(wordy.read_bytes()[:-4096])
    with pytest.raises(OallamaError, match="not within the file bounds"):
        skeleton.dry_run(short, SETTINGS)


def test_files_in_memory_are_few(wordy: Path, tmp_path: Path) -> None:
    for i in range(8):
        copy = tmp_path / f"{i}.gguf"
        copy.symlink_to(wordy)
        skeleton.dry_run(copy, SETTINGS)
    assert 1 <= len(outlines()) <= 4


def outlines() -> list[str]:
    """Files in memory that this process can write; streams of dry runs read them, too, through handles of their own."""
    found = []
    for handle in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            flags = int(Path(f"/proc/self/fdinfo/{handle}").read_text().split("flags:")[1].split()[0], 8)
            if "oallama-outline" in os.readlink(f"/proc/self/fd/{handle}") and flags & os.O_RDWR:
                found.append(handle)
    return found
