"""Models of any architecture, with the widths of a published model and random weights.

Upstream's program that writes tiny models of all architectures is compiled with wider numbers in place of its own (1024
values, 8 heads, 512 tokens of context and more), so that products with weights have their usual share of a pass.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from oallama.bench.machine import REPOSITORY
from oallama.bench.script import note
from oallama.engine import runtime

TREE = REPOSITORY / "third_party" / "llama.cpp" / "patched"
WIDE = (
    (r"n_vocab = 128;", "n_vocab = 4096;"),
    (r"n_embd  = 256;", "n_embd  = 1024;"),
    (r"n_head  = 2;", "n_head  = 8;"),
    (r"n_ff    = 384;", "n_ff    = 3072;"),
    (r"n_embd = 128;\n(\s+)n_head = [12];\n(\s+)n_ff   = 192;", r"n_embd = 1024;\n\1n_head = 8;\n\2n_ff   = 3072;"),
    (r"const uint32_t n_ctx = 256;", "const uint32_t n_ctx = 2048;"),
    (r"LLM_ARCH_QWEN4EXP \? 256 :", "LLM_ARCH_QWEN4EXP ? 128 * n_head :"),
)


def build(folder: Path) -> Path:
    """Upstream's program with wide models."""
    text = (TREE / "tests" / "test-llama-archs.cpp").read_text()
    for old, new in WIDE:
        text, n = re.subn(old, new, text)
        if n == 0:
            raise RuntimeError(f"test-llama-archs.cpp has nothing like {old}")
    source, program = folder / "wide.cpp", folder / "wide"
    source.write_text(text.replace('"../src/', '"'))
    includes = [f"-I{TREE / name}" for name in ("include", "ggml/include", "src", "common", "vendor")]
    lib = runtime.lib_dir()
    libraries = [f"-L{lib}", "-lllama-common", "-lllama", "-lggml", "-lggml-base", f"-Wl,-rpath,{lib}"]
    subprocess.run(["c++", "-std=c++17", "-O1", *includes, str(source), *libraries, "-o", str(program)], check=True)
    return program


def wide_models(program: Path, folder: Path, names: list[str]) -> Iterator[Path]:
    """One at a time: they are up to a gigabyte."""
    for name in names:
        command = [str(program), "-a", name, "-o", str(folder), "-s", "1", "-d", "0.02"]
        done = subprocess.run(command, capture_output=True)
        if done.returncode:
            note(f"{name}: not written ({done.returncode})")
        for path in sorted(folder.glob("*.gguf")):
            yield path
            path.unlink()
