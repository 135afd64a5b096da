#!/usr/bin/env bash
# Builds unpatched llama.cpp from the same pin into build/baseline/bin: the libraries, what a plan is judged against. As
# the engine is built (cmake/llama_cpp.cmake), with CUDA where the engine has it. A no-op when up to date.
#
# usage: scripts/baseline.sh [all | wheel | cuda-wheel]     into build/baseline-NAME/bin:
#        all: CPU kernels of all instruction sets as modules, for a wheel's engine
#        wheel, cuda-wheel: the CPU as llama-cpp-python's own workflows build it for these (bench/their_wheel.py)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

llama_cpp=third_party/llama.cpp
kind=${1:-}
build=build/baseline${kind:+-$kind}
case $kind in
    "") cpu=() ;;
    all) cpu=(-DGGML_NATIVE=OFF -DGGML_BACKEND_DL=ON -DGGML_CPU_ALL_VARIANTS=ON) ;;
    wheel) cpu=(-DGGML_NATIVE=OFF) ;;
    cuda-wheel) cpu=(-DGGML_NATIVE=OFF -DGGML_AVX2=OFF -DGGML_FMA=OFF -DGGML_F16C=OFF) ;;
    *) echo "baseline: error: unknown kind $kind; expected all, wheel, cuda-wheel or nothing" >&2 && exit 1 ;;
esac
log=$build.log
export PATH="$PWD/.venv/bin:$PATH:/usr/local/cuda/bin"
export CCACHE_BASEDIR="$PWD" CCACHE_NOHASHDIR=1 # as in setup.sh

mkdir -p build
python $llama_cpp/upstream.py fetch >/dev/null

# The engine's compilers: ccache tells gcc from cc.
mapfile -t options < <(sed -nE 's/^(CMAKE_C(XX)?_COMPILER):[A-Z]+=(.+)/-D\1=\3/p' build/engine/CMakeCache.txt 2>/dev/null)
# Without Vulkan: upstream's does not compile with the Vulkan headers of Debian 12.
options+=("${cpu[@]}" -DOALLAMA_BASELINE=ON -DCMAKE_BUILD_TYPE=Release -DGGML_RPC=ON -DGGML_VULKAN=OFF)
[ "${OALLAMA_CUDA:-}" != ON ] || command -v nvcc >/dev/null || { echo "baseline: error: no nvcc" >&2; exit 1; }
has_gpu() { nvidia-smi -L 2>/dev/null | grep -q '^GPU'; }
cuda=${OALLAMA_CUDA:-AUTO}
if command -v nvcc >/dev/null && { [ "$cuda" = ON ] || { [ "$cuda" = AUTO ] && has_gpu; }; }; then
    options+=(-DGGML_CUDA=ON "-DCMAKE_CUDA_COMPILER=$(command -v nvcc)")
else
    options+=(-DGGML_CUDA=OFF)
fi
# As for the engine; an architecture, for example.
read -ra given <<<"${CMAKE_ARGS:-}"
options+=("${given[@]}")

run() {
    { "$@" 2>&1 </dev/null | tee -a "$log" | { grep --line-buffered -oE '\[[0-9]*[02468]0/[0-9]+\] .*' || true; }; } || {
        tail -n 15 "$log" >&2
        printf 'baseline: error: %s failed; see %s\n' "$1" "$log" >&2
        exit 1
    }
}

: >"$log"
if [ "$(cat "$build/.options" 2>/dev/null)" != "${options[*]}" ]; then
    echo "baseline: building unpatched llama.cpp (the first time about 1 minute with ccache, 4 without; 2 cores)"
    # --fresh: an option that is no longer given must not live on in the cache.
    run cmake --fresh -S . -B "$build" -G Ninja "${options[@]}"
    echo "${options[*]}" >"$build/.options"
fi
run ninja -C "$build" llama
[ -e "$build/bin/libllama.so" ] || { echo "baseline: error: no $build/bin/libllama.so; see $log" >&2; exit 1; }
