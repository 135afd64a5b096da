"""The rows of the tables of numbers, by group: words, the files in bench/results, what makes a text of their lines."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import chain

import result_gpu
import result_texts as texts
from result_lines import Lines, Row, span

CELLS = (
    "2026-11-21-cells",
    "2026-11-27-cells",  # from here on with both -fa of rivals
    "2026-11-29-cells-rpc",
    "2026-11-30-cells-vulkan",
)
CPU_CELLS = (
    "2026-11-25-cells-cpu",
    "2026-11-26-cells-cpu",
    "2026-11-29-cells-cpu-epyc",
    "2026-11-29-cells-cpu-xeon",
    "2026-11-29-cells-cpu-older-epyc",
    "2026-11-30-cells-cpu-epyc",
    "2026-11-30-cells-cpu-epyc-wide-tiles",
)
ATTENTION = (
    "2026-11-30-attention-epyc",
    "2026-11-25-attention-xeon-huge",
    "2026-11-29-attention-older-epyc",
    "2026-11-30-attention-xeon",
    "2026-11-30-attention-zen4",
)
DEPTHS = ("2026-11-25-cpu-depth-huge", "2026-11-30-cpu-depth-epyc")
WIDE_TILES = ("2026-11-30-cpu-depth-wide-tiles",)
ZEN_4 = ("2026-11-30-cpu-depth-zen4",)
WITH_AVX2 = ("2026-12-01-cpu-depth-older-epyc",)
Q8_CACHE = ("2026-12-01-cpu-depth-q8-cache",)
BUSY_THREADS = ("2026-11-28-busy-threads", "2026-11-29-busy-threads")
FASTER = "request time against llama.cpp's fastest way"
ERRORS = "error of predictions, chosen plans: median (90th percentile)"
UNPATCHED = "llama.cpp unpatched"


def errors_of_chosen(*files: Lines) -> str:
    return texts.errors([texts.chosen(line) for line in texts.latest(*files)])


def faster_on(device: str) -> Callable[..., str]:
    return lambda *files: texts.faster(texts.latest(*files), device=device)


GROUPS: dict[str, list[Row]] = {
    "rivals": [
        Row(f"{FASTER}, CPU alone, both `-fa`, depths 0 to 8192", CPU_CELLS, faster_on("CPU"), True),
        Row(f"{FASTER}, loopback RPC server", CELLS[:-1], faster_on("RPC"), True),
        Row(f"{FASTER}, CPU alone, one `-fa`", CELLS[:1], faster_on("CPU")),
        Row(f"{FASTER}, Vulkan in software, which the plan leaves unused",
            (CELLS[0], CELLS[-1]), faster_on("Vulkan")),
        Row("cells with RPC, with Vulkan or with one `-fa` that are below 0.98x; the smallest", CELLS,
            lambda *files: texts.losing(texts.latest(*files)), True),
        Row("engine without a plan against unpatched llama.cpp, interleaved rounds",
            ("2026-11-21-off-overhead", "2026-11-28-off-overhead"), lambda *files: texts.off([*chain(*files)])),
        Row("the wheel against llama-cpp-python's CPU wheel, and its CUDA wheel's CPU part; CPU alone",
            ("2026-11-28-their-wheel",), partial(texts.against_wheels, setting="CPU"), True),
        Row("the same, half of the model by RPC",
            ("2026-11-28-their-wheel",), partial(texts.against_wheels, setting="50%")),
        Row("OATO alone, both devices on the same two cores, TPOT against `-ngl`: it loses",
            ("2026-11-21-loopback-rpc-50pct",), texts.oato),
    ],
    "predictions": [
        Row(f"{ERRORS}, CPU alone", CPU_CELLS, errors_of_chosen, True),
        Row(f"{ERRORS}, loopback RPC server, Vulkan and the older cells", CELLS, errors_of_chosen),
        Row("the same, all measured plans", CELLS, lambda *files: texts.all_errors(texts.latest(*files))),
        Row("device bytes, measured - predicted, by cell", ("2026-11-21-promises",), texts.device_bytes, True),
        Row("plans loaded and run (architecture, budget, KV type, sequences, draft model)",
            ("2026-11-21-oom-grid",), texts.oom_grid),
        Row("random placements over CPU, Vulkan (lavapipe) and RPC, NMSE against the CPU",
            ("2026-11-21-promises",), texts.placements),
    ],
    "busy": [
        Row("a token beside programs that keep CPUs busy, against llama.cpp; two cores, no plan",
            BUSY_THREADS, partial(texts.beside_loads, what="tpot", rival=UNPATCHED), True),
        Row("the same: a prompt of 128 tokens",
            BUSY_THREADS, partial(texts.beside_loads, what="ttft", rival=UNPATCHED)),
        Row("the same token against llama.cpp with one thread",
            BUSY_THREADS, partial(texts.beside_loads, what="tpot", rival=f"{UNPATCHED}, a thread less")),
    ],
    "starts": [
        Row("planning QwQ-32B, dry runs included: `exact`, to 0.1 % of its bound",
            ("2026-11-26-planner-speed",), partial(texts.planning, shape="qwq-32b")),
        Row("the same of Qwen3-235B-A22B (94 layers)",
            ("2026-11-26-planner-speed",), partial(texts.planning, shape="qwen3-235b-a22b")),
        Row("a start with a kept plan, against one without a plan: three models of 8B to 235B",
            ("2026-11-24-planner-start",), texts.second_start, True),
        Row("the first profile of a model of 270M parameters, in all; its accelerator (RPC), its CPU",
            ("2026-11-26-profile-speed",), texts.first_profile),
        Row("the wheel; `pip install` of it in a bare Debian 12; the first token",
            ("2026-11-26-bare-root",), texts.bare_root),
        Row("fresh clone: `make demo`; again; `make check`; `make test`",
            ("2026-11-28-fresh-clone",), texts.clone, True),
        Row("writing LLaMA3-8B in F16 (16 GB); memory at most", ("2026-11-21-first-light",), texts.writing),
    ],
    "memory": [
        Row("compute buffer of a 128k-vocabulary llama at a micro-batch of 512: llama.cpp's, ours",
            ("2026-11-21-won-back",), texts.won_back),
        Row("device bytes of `--vram minimal` against everything resident: 247M model, loaded",
            ("2026-11-22-streaming-memory",), partial(texts.saved, model="demo")),
        Row("the same by dry run: LLaMA3-8B; QwQ-32B", ("2026-11-22-streaming-memory",),
            lambda lines: f"{texts.saved(lines, 'llama3-8b')}; {texts.saved(lines, 'qwq-32b')}"),
        Row("TTFT of streamed feed-forwards against llama.cpp's uploads, Vulkan in software",
            ("2026-11-22-streaming-uploads",),
            lambda lines: span([line["ratio"] for line in lines if line.get("what") == "uploads"], "{:.2f}x")),
    ],
    "cpu": [
        Row("one layer's attention, our kernels against the faster of ggml's two forms: f16 cache",
            ATTENTION, partial(texts.attention, cache="f16"), True),
        Row("the same: q8_0 cache",
            (*ATTENTION[:1], "2026-11-24-attention-xeon", *ATTENTION[2:]), partial(texts.attention, cache="q8_0")),
        Row("prompt of 512 tokens, our kernels against llama.cpp's without AMX",
            ("2026-11-24-cpu-prompts",), texts.prompts),
        Row("a 4096 x 4096 matrix with 2 to 8 columns on an EPYC with AVX2, our kernels against the faster of ggml's "
            "two forms", ("2026-12-01-products-few-older-epyc",), texts.few_columns, True),
        Row("2 layers of a model, `auto` against llama.cpp's faster `-fa`: TTFT of 512 tokens behind 0 and 12288 "
            "(and 32768 for one model)", DEPTHS, partial(texts.at_depth, time="ttft", rival="llama.cpp")),
        Row("the same: TPOT", DEPTHS, partial(texts.at_depth, time="tpot", rival="llama.cpp")),
        Row("with today's tiles, 2 layers of a model on the CPU alone behind 12288 (and 32768 for one), `auto` "
            "against llama.cpp's faster `-fa`: TTFT of 512 tokens", WIDE_TILES,
            partial(texts.at_depth, time="ttft", rival="llama.cpp"), True),
        Row("the same: TPOT", WIDE_TILES, partial(texts.at_depth, time="tpot", rival="llama.cpp"), True),
        Row("TPOT of 2 layers on the CPU alone behind 0 and 12288 against ik_llama.cpp's fastest flags",
            DEPTHS, partial(texts.at_depth, time="tpot", rival="ik"), True),
        Row("the same with today's tiles on Zen 4", ZEN_4, partial(texts.at_depth, time="tpot", rival="ik"), True),
        Row("2 layers on Zen 4 behind 0 and 12288 against llama.cpp's faster `-fa`: TTFT of 512 tokens", ZEN_4,
            partial(texts.at_depth, time="ttft", rival="llama.cpp")),
        Row("the same: TPOT", ZEN_4, partial(texts.at_depth, time="tpot", rival="llama.cpp")),
        Row("2 layers on an EPYC with AVX2 without a depth against llama.cpp's faster `-fa`: TTFT of 512 tokens",
            WITH_AVX2, partial(texts.at_depth, time="ttft", rival="llama.cpp")),
        Row("the same: TPOT", WITH_AVX2, partial(texts.at_depth, time="tpot", rival="llama.cpp")),
        Row("the same: TPOT against ik_llama.cpp's fastest flags", WITH_AVX2,
            partial(texts.at_depth, time="tpot", rival="ik")),
        Row("2 layers on an EPYC with AVX2 and a q8_0 cache, behind 4096, against llama.cpp with the same cache: "
            "TTFT of 512 tokens", Q8_CACHE, partial(texts.at_depth, time="ttft", rival="llama.cpp"), True),
        Row("the same: TPOT", Q8_CACHE, partial(texts.at_depth, time="tpot", rival="llama.cpp"), True),
        Row("the same: TPOT against ik_llama.cpp's fastest flags with the same cache", Q8_CACHE,
            partial(texts.at_depth, time="tpot", rival="ik"), True),
    ],
    "hosts": [
        Row("2 emulated hosts x 4 ranks, 1 Gbit: against the same with a star all-reduce",
            ("2026-11-22-cluster",), texts.against_star),
        Row("2 emulated hosts x 4 ranks, 1 Gbit, against llama.cpp's `-sm tensor` over RPC: TTFT, TPOT",
            ("2026-11-22-cluster",), texts.against_rpc, True),
        Row("layers over emulated hosts by the MILP: error of predicted request times, run 1; run 2",
            ("2026-11-22-pipeline", "2026-11-22-pipeline-again"), texts.pipeline),
    ],
    "guests": [
        Row("a hot model's step, guests' attention after every operator against after whole graphs",
            ("2026-11-23-weave",), texts.weave),
        Row("a hot model's step with four guests of eight sequences, our attention against ggml's",
            ("2026-12-01-weave-ours",), texts.own_attention),
        Row("tokens per second of a hot model (Q8_0, six clients, four guests) and of its cold one, by the plans that "
            "`oallama serve` makes against none", ("2026-12-01-planned-hot",), texts.planned_hot),
        Row("highest rate of a hot model with 90 % in time, guests against the best of 2, 4 and 6 slots in the same "
            "memory", ("2026-11-30-capacity", "2026-12-01-capacity-ours"), texts.capacity),
        Row("faults of receivers: wrong tokens, hangs; noticed after at most",
            ("2026-11-23-weave-soak",), texts.soak),
    ],
    "gpu": result_gpu.ROWS,
}  # fmt: skip
