#!/usr/bin/env python3
"""Writes a GGUF model with random weights: a thin front of oallama.modelmaker.

Example: scripts/make_model.py 8b.gguf --shape llama3-8b --type Q4_K_M --set n_layer=8
"""

from __future__ import annotations

import argparse
import sys

from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

from oallama.errors import OallamaError
from oallama.modelmaker import ARCHITECTURES, FILE_TYPES, SHAPES, make_model


def main(argv: list[str] | None = None) -> int:
    """Run the program; returns 0, 2 for a user's mistake, 130 for Ctrl-C."""
    shapes = "; ".join(f"{arch}: {', '.join(names)}" for arch, names in SHAPES.items())
    parser = argparse.ArgumentParser(description="Write a GGUF model with random weights and a real tokenizer.")
    parser.add_argument("path", help="the file to write")
    parser.add_argument("--arch", help=f"one of {', '.join(ARCHITECTURES)} (default: that of the shape)")
    parser.add_argument("--shape", default="tiny", help=f"{shapes} (default: %(default)s)")
    parser.add_argument("--type", default="F16", help=f"one of {', '.join(FILE_TYPES)} (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="non-negative integer (default: %(default)s)")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=N",
        type=_setting,
        dest="overrides",
        help="override a hyper-parameter, e.g. n_layer=8; may be repeated",
    )
    args = parser.parse_args(argv)
    columns = (BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn())
    try:
        with Progress(*columns) as bar:
            task = bar.add_task("", total=None)
            path = make_model(
                args.path,
                arch=args.arch,
                shape=args.shape,
                file_type=args.type,
                seed=args.seed,
                overrides=dict(args.overrides),
                progress=lambda done, total: bar.update(task, completed=done, total=total),
            )
    except OallamaError as error:
        print(f"make_model: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("make_model: interrupted, nothing was written", file=sys.stderr)
        return 130
    print(f"{path}: {path.stat().st_size / 2**20:.1f} MiB")
    return 0


def _setting(text: str) -> tuple[str, int]:
    name, _, value = text.partition("=")
    if not value.isdecimal():
        raise argparse.ArgumentTypeError(f"expected NAME=N, got {text!r}")
    return name, int(value)


if __name__ == "__main__":
    sys.exit(main())
