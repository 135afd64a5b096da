#!/usr/bin/env bash
# Experts in slots under ThreadSanitizer: two contexts of a model and the copier. scripts/tsan_slots.sh [STEPS [unordered]]
# Builds tests/native/tsan with clang (a minute the first time) and runs STEPS steps of each context (2000). Ends with an
# error at the first race. unordered: tables change before uploads end, which ThreadSanitizer must find.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [[ ! ${1:-2000} =~ ^[0-9]+$ || ! ${2:-unordered} = unordered ]]; then
    echo 'usage: scripts/tsan_slots.sh [STEPS [unordered]]' >&2
    exit 2
fi
scripts/clang_build.sh tsan slots_threads
export TSAN_OPTIONS=halt_on_error=1
# ThreadSanitizer wants addresses that many random bits do not leave.
fixed=(setarch --addr-no-randomize)
"${fixed[@]}" true 2>/dev/null || fixed=()
"${fixed[@]}" build/tsan/slots_threads "${1:-2000}" "${@:2}"
