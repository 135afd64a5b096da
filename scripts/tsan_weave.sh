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
scripts/clang_build.sh tsan weave_tsan
[ "${1:-}" = build ] || .venv/bin/python tests/support/weave_tsan.py build/tsan/weave_tsan "${1:-300}" ${2:+"$2"}
