"""The peak of this machine's CPU: independent multiply-adds on every core at once.

python bench/peak.py [--rounds 5] [--out FILE.jsonl]

Compiles a small C program (cc, compiler vectors, -march=native) and runs it on each CPU that this process may use, all
at once. One JSON line: flops per instruction, GFLOP/s of each CPU in each round, and the median of their sums. What
`attention.py --efficiencies --peak-gflops` takes.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from oallama.bench.machine import describe
from oallama.bench.script import arguments, record

# Twelve sums hide the latency of two units that take four cycles each.
PROGRAM = r"""
#include <stdio.h>
#include <time.h>
#if defined(__AVX512F__)
#define WIDTH 16
#elif defined(__AVX2__)
#define WIDTH 8
#else
#define WIDTH 4
#endif
typedef float Floats __attribute__((vector_size(4 * WIDTH)));
int main(void) {
    enum { n_sums = 12, n_steps = 60000000 };
    Floats sums[n_sums], factor = { 0 }, term = { 0 };
    for (int i = 0; i < WIDTH; ++i) { factor[i] = 0.999f; term[i] = 0.001f; }
    for (int i = 0; i < n_sums; ++i) sums[i] = term;
    struct timespec begin, end;
    clock_gettime(CLOCK_MONOTONIC, &begin);
    for (int step = 0; step < n_steps; ++step) {
#pragma GCC unroll 12
        for (int i = 0; i < n_sums; ++i) sums[i] = sums[i] * factor + term;
    }
    clock_gettime(CLOCK_MONOTONIC, &end);
    float kept = 0;
    for (int i = 0; i < n_sums; ++i) kept += sums[i][0];
    const double seconds = (end.tv_sec - begin.tv_sec) + 1e-9 * (end.tv_nsec - begin.tv_nsec);
    printf("%d %.3f %g\n", 2 * WIDTH, 2.0 * WIDTH * n_sums * n_steps / seconds / 1e9, kept);
}
"""


def main() -> None:
    parser = arguments(__doc__, "peak")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    record([measured(options.rounds)], options.out, each={"machine": describe()})


def measured(rounds: int) -> dict[str, Any]:
    cpus = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        source, program = Path(folder) / "peak.c", Path(folder) / "peak"
        source.write_text(PROGRAM)
        subprocess.run(["cc", "-O2", "-march=native", "-ffp-contract=fast", source, "-o", program], check=True)
        found = [together(program, cpus) for _ in range(rounds)]
    return {
        "what": "peak",
        "cpus": len(cpus),
        "flops_per_instruction": found[0][0][0],
        "gflop_s_by_cpu": [[rate for _, rate in each] for each in found],
        "gflop_s": round(median(sum(rate for _, rate in each) for each in found), 1),
    }


def together(program: Path, cpus: list[int]) -> list[tuple[int, float]]:
    """(flops per instruction, GFLOP/s) of each CPU."""
    runs = [subprocess.Popen(["taskset", "-c", str(cpu), program], stdout=subprocess.PIPE, text=True) for cpu in cpus]
    words = [run.communicate()[0].split() for run in runs]
    return [(int(flops), float(rate)) for flops, rate, _ in words]


if __name__ == "__main__":
    main()
