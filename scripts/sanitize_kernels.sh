#!/usr/bin/env bash
# Our kernels (csrc/attend, csrc/products, csrc/decode) under sanitizers:
#     scripts/sanitize_kernels.sh attend|products|decode thread|address [ROUNDS [unwaited]]
# Builds the family's program (tests/native) with clang (a minute or two the first time) under ThreadSanitizer, or under ASan
# and UBSan, and runs ROUNDS random operators (200). Ends with an error at the first finding. unwaited: threads do not
# wait for each other, which ThreadSanitizer must find.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [[ ! ${1:-} =~ ^(attend|products|decode)$ || ! ${2:-} =~ ^(thread|address)$ || ! ${3:-200} =~ ^[0-9]+$ ||
    ! ${4:-unwaited} = unwaited ]]; then
    echo 'usage: scripts/sanitize_kernels.sh attend|products|decode thread|address [ROUNDS [unwaited]]' >&2
    exit 2
fi
command -v clang++ >/dev/null || { echo 'sanitize_kernels.sh: clang is not here (apt-get install clang)' >&2; exit 2; }
PATH="$PWD/.venv/bin:$PATH"
python third_party/llama.cpp/upstream.py prepare
project=tsan
[ "$2" = thread ] || project=fuzz
launcher=()
command -v ccache >/dev/null && launcher=(-DCMAKE_C_COMPILER_LAUNCHER=ccache -DCMAKE_CXX_COMPILER_LAUNCHER=ccache)
cmake -S "tests/native/$project" -B "build/$project" -G Ninja -DCMAKE_C_COMPILER=clang -DCMAKE_CXX_COMPILER=clang++ \
    "${launcher[@]}" >/dev/null
cmake --build "build/$project" --target "$1_threads" >&2
export TSAN_OPTIONS=halt_on_error=1 ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1
# ThreadSanitizer wants addresses that many random bits do not leave.
fixed=(setarch --addr-no-randomize)
"${fixed[@]}" true 2>/dev/null || fixed=()
"${fixed[@]}" "build/$project/$1_threads" "${3:-200}" 1 "${@:4}"
