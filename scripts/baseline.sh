#!/usr/bin/env bash
# Builds unpatched llama.cpp from the same pin into build/baseline/bin: libraries and llama-bench, what a plan is judged
# against. Without Vulkan: upstream's does not compile with the Vulkan headers of Debian 12. With CUDA where the engine
# has it. A no-op when up to date.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

llama_cpp=third_party/llama.cpp
build=build/baseline
log=build/baseline.log
export PATH="$PWD/.venv/bin:$PATH:/usr/local/cuda/bin"
export CCACHE_BASEDIR="$PWD" CCACHE_NOHASHDIR=1

mkdir -p build
python $llama_cpp/upstream.py fetch >/dev/null

options=(
    -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=ON
    -DGGML_RPC=ON -DGGML_VULKAN=OFF -DGGML_CCACHE=OFF
    -DLLAMA_BUILD_TOOLS=ON -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF
    -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF
    # Else llama.cpp asks git, and reports commits of the checkout around it.
    "-DLLAMA_BUILD_COMMIT=$(python -c "import json; print(json.load(open('$llama_cpp/pin.json'))['llama_cpp_commit'])")"
    -DLLAMA_BUILD_NUMBER=0
    # Works around a fault of some versions of GCC.
    "-DCMAKE_CXX_FLAGS=-include $PWD/cmake/amx_tile_config.h"
)
if [ "${OALLAMA_CUDA:-AUTO}" != OFF ] && command -v nvcc >/dev/null && nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then
    options+=(-DGGML_CUDA=ON "-DCMAKE_CUDA_COMPILER=$(command -v nvcc)")
else
    options+=(-DGGML_CUDA=OFF)
fi
# As for the engine; an architecture, for example.
read -ra given <<<"${CMAKE_ARGS:-}"
options+=("${given[@]}")
if command -v ccache >/dev/null; then
    options+=(-DCMAKE_C_COMPILER_LAUNCHER=ccache -DCMAKE_CXX_COMPILER_LAUNCHER=ccache)
    options+=(-DCMAKE_CUDA_COMPILER_LAUNCHER=ccache)
fi

run() {
    { "$@" 2>&1 </dev/null | tee -a "$log" | { grep --line-buffered -oE '\[[0-9]*[02468]0/[0-9]+\] .*' || true; }; } || {
        tail -n 15 "$log" >&2
        printf 'baseline: error: %s failed; see %s\n' "$1" "$log" >&2
        exit 1
    }
}

: >"$log"
if [ "$(cat $build/.options 2>/dev/null)" != "${options[*]}" ]; then
    echo "baseline: building unpatched llama.cpp (about 8 minutes the first time on 2 cores)"
    # --fresh: an option that is no longer given must not live on in the cache.
    run cmake --fresh -S $llama_cpp/upstream -B $build -G Ninja "${options[@]}"
    echo "${options[*]}" >$build/.options
fi
run ninja -C $build llama llama-bench
[ -e $build/bin/libllama.so ] || { echo "baseline: error: no $build/bin/libllama.so; see $log" >&2; exit 1; }
