#!/usr/bin/env bash
# Our attention (csrc/attend) under sanitizers: scripts/sanitize_attend.sh thread|address [ROUNDS [unwaited]]
# PROGRAM=thin_threads: our products with few columns (csrc/decode) in its place.
# Builds tests/native/attend_threads.cpp with clang (a minute or two the first time) under ThreadSanitizer, or under ASan
# and UBSan, and runs ROUNDS random operators (200). Ends with an error at the first finding. unwaited: threads do not
# wait for each other, which ThreadSanitizer must find.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [[ ! ${1:-} =~ ^(thread|address)$ || ! ${2:-200} =~ ^[0-9]+$ || ! ${3:-unwaited} = unwaited ]]; then
    echo 'usage: scripts/sanitize_attend.sh thread|address [ROUNDS [unwaited]]' >&2
    exit 2
fi
command -v clang++ >/dev/null || { echo 'sanitize_attend.sh: clang is not here (apt-get install clang)' >&2; exit 2; }
PATH="$PWD/.venv/bin:$PATH"
python third_party/llama.cpp/upstream.py prepare
project=tsan
program=${PROGRAM:-attend_threads}
[ "$1" = thread ] || project=fuzz
launcher=()
command -v ccache >/dev/null && launcher=(-DCMAKE_C_COMPILER_LAUNCHER=ccache -DCMAKE_CXX_COMPILER_LAUNCHER=ccache)
cmake -S "tests/native/$project" -B "build/$project" -G Ninja -DCMAKE_C_COMPILER=clang -DCMAKE_CXX_COMPILER=clang++ \
    "${launcher[@]}" >/dev/null
cmake --build "build/$project" --target "$program" >&2
export TSAN_OPTIONS=halt_on_error=1 ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1
# ThreadSanitizer wants addresses that many random bits do not leave.
fixed=(setarch --addr-no-randomize)
"${fixed[@]}" true 2>/dev/null || fixed=()
"${fixed[@]}" "build/$project/$program" "${2:-200}" 1 "${@:3}"
