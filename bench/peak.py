"""The peak of this machine's CPU: independent multiply-adds on every core at once.

python bench/peak.py [--bf16-tiles] [--rounds 5] [--out FILE.jsonl]

Compiles a small C program (cc, compiler vectors, -march=native) and runs it on each CPU that this process may use, all
at once. One JSON line: flops per instruction, GFLOP/s of each CPU in each round, and the median of their sums. What
`attention.py --efficiencies --peak-gflops` takes. With --bf16-tiles: the peak of AMX, products of bf16 summed in f32.
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
from oallama.errors import OallamaError

# Twelve sums hide the latency of two units that take four cycles each.
VECTORS = r"""
#if defined(__AVX512F__)
#define WIDTH 16
#elif defined(__AVX2__)
#define WIDTH 8
#else
#define WIDTH 4
#endif
typedef float Floats __attribute__((vector_size(4 * WIDTH)));
enum { n_flops = 2 * WIDTH, n_sums = 12, n_steps = 60000000 };
#define READY \
    Floats sums[n_sums], factor = { 0 }, term = { 0 }; \
    for (int i = 0; i < WIDTH; ++i) { factor[i] = 0.999f; term[i] = 0.001f; } \
    for (int i = 0; i < n_sums; ++i) sums[i] = term;
#define STEP _Pragma("GCC unroll 12") for (int i = 0; i < n_sums; ++i) sums[i] = sums[i] * factor + term;
#define KEEP for (int i = 0; i < n_sums; ++i) kept += sums[i][0];
"""
# Four sums of 16 x 16; 0x1023 of arch_prctl asks for the state of tiles (18).
BF16_TILES = r"""
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
enum { n_flops = 2 * 16 * 16 * 32, n_sums = 4, n_steps = 20000000 };
#define READY \
    struct { unsigned char palette, row, zeros[14]; unsigned short bytes[16]; unsigned char rows[16]; } \
        config __attribute__((aligned(64))) = { .palette = 1 }; \
    for (int i = 0; i < 8; ++i) { config.bytes[i] = 64; config.rows[i] = 16; } \
    if (syscall(SYS_arch_prctl, 0x1023, 18)) return 1; \
    _tile_loadconfig(&config); \
    _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3); \
    _tile_zero(4); _tile_zero(5); _tile_zero(6); _tile_zero(7);
#define STEP \
    _tile_dpbf16ps(0, 4, 6); _tile_dpbf16ps(1, 4, 7); _tile_dpbf16ps(2, 5, 6); _tile_dpbf16ps(3, 5, 7);
#define KEEP _tile_release();
"""
PROGRAM = r"""
#include <stdio.h>
#include <time.h>
int main(void) {
    READY
    struct timespec begin, end;
    clock_gettime(CLOCK_MONOTONIC, &begin);
    for (int step = 0; step < n_steps; ++step) { STEP }
    clock_gettime(CLOCK_MONOTONIC, &end);
    float kept = 0;
    KEEP
    const double seconds = (end.tv_sec - begin.tv_sec) + 1e-9 * (end.tv_nsec - begin.tv_nsec);
    printf("%d %.3f %g\n", n_flops, (double) n_flops * n_sums * n_steps / seconds / 1e9, kept);
    return 0;
}
"""


def main() -> None:
    parser = arguments(__doc__, "peak")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--bf16-tiles", action="store_true")
    options = parser.parse_args()
    record([measured(options.rounds, options.bf16_tiles)], options.out, each={"machine": describe()})


def measured(rounds: int, bf16_tiles: bool) -> dict[str, Any]:
    cpus = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        source, program = Path(folder) / "peak.c", Path(folder) / "peak"
        source.write_text((BF16_TILES if bf16_tiles else VECTORS) + PROGRAM)
        flags = ["-O2", "-march=native", "-ffp-contract=fast"] + ["-mamx-tile", "-mamx-bf16"] * bf16_tiles
        subprocess.run(["cc", *flags, source, "-o", program], check=True)
        found = [together(program, cpus) for _ in range(rounds)]
    return {
        "what": "peak of bf16 tiles" if bf16_tiles else "peak",
        "cpus": len(cpus),
        "flops_per_instruction": found[0][0][0],
        "gflop_s_by_cpu": [[rate for _, rate in each] for each in found],
        "gflop_s": round(median(sum(rate for _, rate in each) for each in found), 1),
    }


def together(program: Path, cpus: list[int]) -> list[tuple[int, float]]:
    """(flops per instruction, GFLOP/s) of each CPU. Raises OallamaError where a CPU lacks the instructions."""
    runs = [subprocess.Popen(["taskset", "-c", str(cpu), program], stdout=subprocess.PIPE, text=True) for cpu in cpus]
    words = [run.communicate()[0].split() for run in runs]
    if any(run.returncode for run in runs):
        raise OallamaError("expected a CPU with the instructions of the program (--bf16-tiles: AMX)")
    return [(int(flops), float(rate)) for flops, rate, _ in words]


if __name__ == "__main__":
    main()
