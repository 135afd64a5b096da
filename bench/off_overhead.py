"""What the hooks cost when nothing is planned: patched against unpatched libllama on the CPU, interleaved.

python bench/off_overhead.py [--out STEM] [--shape small] [--type Q8_0]
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from oallama.bench import Engine, LoadParams, Sweep, find_baseline_lib, print_table, run_bench, write_reports
from oallama.bench.script import arguments
from oallama.engine import runtime
from oallama.modelmaker import make_model


def main() -> None:
    parser = arguments(__doc__, "off-overhead", suffix="")
    parser.add_argument("--shape", default="small")
    parser.add_argument("--type", default="Q8_0")
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()

    cpu = LoadParams(n_ctx=512, devices=())
    engines = [
        Engine("llama.cpp unpatched", find_baseline_lib(), cpu, placement="CPU", baseline=True),
        Engine("oallama, no plan", runtime.lib_dir(), cpu, placement="CPU"),
    ]
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder) / f"llama-{options.shape}-{options.type}.gguf", shape=options.shape,
                           file_type=options.type)  # fmt: skip
        sweep = Sweep(prompts=(128,), gens=(128,), repeats=options.repeats)
        results = run_bench(model, engines, sweep)
    print_table(results)
    write_reports(results, options.out)


if __name__ == "__main__":
    main()
