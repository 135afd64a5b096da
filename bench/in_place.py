"""How far the profile is off in a model's own graphs on the CPU: by kind of operator, behind a depth.

python bench/in_place.py [--archs minicpm3,qwen2] [--forms on,off] [--depths 512,2048] [--threads N]
    [--out FILE.jsonl]
python bench/in_place.py --tables FILE.jsonl

The models are those of bench/cells.py. Each is profiled anew. Then it is loaded with llama.cpp's own kernels, and the
operator timer takes five tokens behind the depth and five prompts of 128. `oallama profile --operators --in-place` does
the same for one model, behind 512. One JSON line per model, form of attention and depth: for each kind of operator its
number, and the seconds that the profile says and that the graphs took, a sum over all layers. --tables prints the
lines.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cells import written

from oallama.bench.machine import describe
from oallama.bench.script import arguments, numbers, read, record, words
from oallama.cli.operators import in_place
from oallama.data.plan import HOST
from oallama.engine.load_settings import Settings
from oallama.loading import autoplan
from oallama.loading.autoplan import Choices
from oallama.profiling.profiler import forget

N_PROMPT = 128


def main() -> None:
    parser = arguments(__doc__, "in-place")
    parser.add_argument("--archs", type=words, default="minicpm3,qwen2")
    parser.add_argument("--forms", type=words, default="on,off", help="-fa")
    parser.add_argument("--depths", type=numbers, default="512,2048")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tables", type=Path)
    options = parser.parse_args()
    if options.tables:
        print(tables(read(options.tables)))
        return
    record(measured(options), options.out, each={"machine": describe()}, quiet=True)


def measured(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for arch in options.archs:
        with tempfile.TemporaryDirectory() as folder:
            model = written(arch, Path(folder))
            forget([], options.threads)
            for form in options.forms:
                for depth in options.depths:
                    line = {"arch": arch, "flash_attn": form, "depth": depth, "n_threads": options.threads}
                    line |= compared(model, form, depth, options.threads)
                    print(rows(line), flush=True)
                    yield line


def compared(model: Path, form: str, depth: int, n_threads: int) -> dict[str, Any]:
    """Kinds of operators of a token and of a prompt."""
    settings = Settings(n_ctx=-(-(depth + N_PROMPT) // 256) * 256, n_threads=n_threads, flash_attn=form)
    graph = autoplan.read_graph(model, settings)
    settings = autoplan.resolve(settings, graph.n_ctx_train)
    profile = autoplan.profile_for(graph, Choices(device=HOST), settings)
    found = in_place(profile, graph, settings, model, N_PROMPT, depth)
    return {of: [asdict(row) for row in found[name]] for of, name in (("token", "decode"), ("prompt", "prefill"))}


def rows(line: dict[str, Any]) -> str:
    """A line's kinds that take 2 % and more of its pass: seconds by the profile over those in place."""
    text = f"{line['arch']} -fa {line['flash_attn']} behind {line['depth']}:"
    for of in ("token", "prompt"):
        whole = sum(row["measured_s"] for row in line[of])
        parts = [
            f"{row['kind']} {row['measured_s'] * 1e3:.1f} ms, {row['predicted_s'] / row['measured_s']:.2f}x"
            for row in line[of]
            if row["predicted_s"] and row["measured_s"] >= 0.02 * whole
        ]
        text += f"\n  {of}, {whole * 1e3:.1f} ms: " + "; ".join(parts)
    return text


def tables(lines: list[dict[str, Any]]) -> str:
    return "\n".join(f"{line['machine']['commit'][:7]} {rows(line)}" for line in lines)


if __name__ == "__main__":
    main()
