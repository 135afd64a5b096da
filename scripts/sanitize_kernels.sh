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
project=tsan
[ "$2" = thread ] || project=fuzz
scripts/clang_build.sh "$project" "$1_threads"
export TSAN_OPTIONS=halt_on_error=1 ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1
# ThreadSanitizer wants addresses that many random bits do not leave.
fixed=(setarch --addr-no-randomize)
"${fixed[@]}" true 2>/dev/null || fixed=()
"${fixed[@]}" "build/$project/$1_threads" "${3:-200}" 1 "${@:4}"
