"""Whether clang++ can build for a sanitizer here."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest


def skip_without(sanitizer: str) -> None:
    """Skip the test where clang++ is not here or lacks the sanitizer: "thread", "address"."""
    compiler = shutil.which("clang++")
    if compiler is None:
        pytest.skip("clang++ is not here")
    tried = [compiler, f"-fsanitize={sanitizer}", "-x", "c++", "-", "-o", os.devnull]
    if subprocess.run(tried, input=b"int main() {}", capture_output=True).returncode != 0:
        pytest.skip(f"clang++ has no sanitizer for {sanitizer} here")


def without_random_addresses() -> list[str]:
    """What stands before a program: ThreadSanitizer wants addresses that many random bits do not leave."""
    command = ["setarch", "--addr-no-randomize"]
    return command if subprocess.run([*command, "true"], capture_output=True).returncode == 0 else []
