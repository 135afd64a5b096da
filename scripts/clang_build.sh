#!/usr/bin/env bash
# Builds programs of tests/native with clang, for sanitizers: scripts/clang_build.sh fuzz|tsan TARGET...
# They lie in build/fuzz and build/tsan. Processes that build the same folder wait for each other.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [[ ! ${1:-} =~ ^(fuzz|tsan)$ || $# -lt 2 ]]; then
    echo 'usage: scripts/clang_build.sh fuzz|tsan TARGET...' >&2
    exit 2
fi
command -v clang++ >/dev/null || { echo 'clang_build.sh: clang is not here (apt-get install clang)' >&2; exit 2; }
PATH="$PWD/.venv/bin:$PATH"
python third_party/llama.cpp/upstream.py prepare
launcher=()
command -v ccache >/dev/null && launcher=(-DCMAKE_C_COMPILER_LAUNCHER=ccache -DCMAKE_CXX_COMPILER_LAUNCHER=ccache)
mkdir -p "build/$1"
exec 9>"build/$1/.lock"
flock 9
cmake -S "tests/native/$1" -B "build/$1" -G Ninja -DCMAKE_C_COMPILER=clang -DCMAKE_CXX_COMPILER=clang++ "${launcher[@]}" >/dev/null
cmake --build "build/$1" --target "${@:2}" >&2
