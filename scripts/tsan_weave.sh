#!/usr/bin/env bash
# Both sides of a channel of csrc/weave under ThreadSanitizer: scripts/tsan_weave.sh [build | ROUNDS [FILE.jsonl]]
# Builds tests/native/tsan with clang (a minute the first time), runs it for ROUNDS senders (300), then once for each access that
# is made weaker. Ends with an error if there is a race, or if one of those has none. `build`: builds, and no more.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [[ ! ${1:-300} =~ ^(build|[0-9]+)$ ]]; then
    echo 'usage: scripts/tsan_weave.sh [build | ROUNDS [FILE.jsonl]]' >&2
    exit 2
fi
command -v clang++ >/dev/null || { echo 'tsan_weave.sh: clang is not here (apt-get install clang)' >&2; exit 2; }
PATH="$PWD/.venv/bin:$PATH"
python third_party/llama.cpp/upstream.py prepare
launcher=()
command -v ccache >/dev/null && launcher=(-DCMAKE_C_COMPILER_LAUNCHER=ccache -DCMAKE_CXX_COMPILER_LAUNCHER=ccache)
cmake -S tests/native/tsan -B build/tsan -G Ninja -DCMAKE_C_COMPILER=clang -DCMAKE_CXX_COMPILER=clang++ "${launcher[@]}" >/dev/null
cmake --build build/tsan --target weave_tsan
[ "${1:-}" = build ] || python tests/support/weave_tsan.py build/tsan/weave_tsan "${1:-300}" ${2:+"$2"}
