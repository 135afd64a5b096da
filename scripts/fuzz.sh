#!/usr/bin/env bash
# Fuzzes what comes to the RPC server over the network: scripts/fuzz.sh SECONDS [handshake|commands [FOLDER]]
# Builds tests/native/fuzz with clang under ASan and UBSan (minutes the first time), runs each target for SECONDS from
# tests/native/fuzz/corpus and the inputs in FOLDER, keeps new inputs in build/fuzz/found. 0 seconds: the inputs alone.
# Ends with an error at the first finding (build/fuzz/crash-*).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [[ ! ${1:-} =~ ^[0-9]+$ ]] || { [ -n "${2:-}" ] && [ ! -e "tests/native/fuzz/fuzz_$2.cpp" ]; }; then
    echo 'usage: scripts/fuzz.sh SECONDS [handshake|commands [FOLDER]]' >&2
    exit 2
fi
scripts/clang_build.sh fuzz fuzz_handshake fuzz_commands

long=-max_total_time=$1
[ "$1" != 0 ] || long=-runs=0
export ASAN_OPTIONS=allocator_may_return_null=1:detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1
for target in ${2:-handshake commands}; do
    mkdir -p "build/fuzz/found/$target"
    "build/fuzz/fuzz_$target" "$long" -timeout=60 -rss_limit_mb=4096 -max_len=16384 -print_final_stats=1 \
        -artifact_prefix=build/fuzz/ "build/fuzz/found/$target" "tests/native/fuzz/corpus/$target" "${@:3}"
done
