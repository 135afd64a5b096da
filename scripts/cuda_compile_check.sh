#!/usr/bin/env bash
# Compiles, for one architecture and without a GPU, every .cu file that a patch touches and the .cu and *_cuda.cpp files
# of csrc/ and tests/native: all of ggml-cuda would take 20 minutes. Flags as in ggml/src/ggml-cuda/CMakeLists.txt. CUDA_ARCH=sm_90 is the default.
# CUDA_FILES, a regular expression, picks some. The kernels of csrc/weave/cuda: no warnings, registers and spills are said,
# and attention of heads of 128 in f16 must not spill.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

llama_cpp=third_party/llama.cpp
ggml=$llama_cpp/patched/ggml
export PATH="$PATH:/usr/local/cuda/bin"

if ! command -v nvcc >/dev/null; then
    echo "cuda compile check: SKIPPED, no nvcc"
    exit 0
fi
python3 $llama_cpp/upstream.py prepare >/dev/null

mapfile -t sources < <(
    {
        sed -n 's|^+++ b/\(.*\.cu\)$|'$llama_cpp'/patched/\1|p' $llama_cpp/patches/*.patch
        find csrc tests/native -name '*.cu' -o -name '*_cuda.cpp'
    } 2>/dev/null | sort -u | grep -E "${CUDA_FILES:-.}"
)
if [ ${#sources[@]} = 0 ]; then
    echo "cuda compile check: SKIPPED, no patch and nothing of ours touches CUDA"
    exit 0
fi

flags=(
    -c -arch="${CUDA_ARCH:-sm_90}" -std=c++17 -O1 -use_fast_math -extended-lambda -Xcompiler -fPIC
    -DGGML_USE_CUDA -DGGML_CUDA_USE_GRAPHS -DGGML_BACKEND_SHARED -DGGML_SHARED -DGGML_SCHED_MAX_COPIES=4
    -I "$ggml/include" -I "$ggml/src" -I "$ggml/src/ggml-cuda"
)
while IFS= read -r folder; do flags+=(-I "$folder"); done < <(find csrc -type d)

objects=$(mktemp -d)
trap 'rm -rf "$objects"' EXIT
launcher=$(command -v ccache || true)
echo "cuda compile check: ${#sources[@]} files for ${CUDA_ARCH:-sm_90}, $(nvcc --version | tail -n 2 | head -n 1)"

# From what ptxas says: the most registers, and functions that spill.
report_registers() {
    awk '
        /Function properties for/ { name = $NF }
        /Used [0-9]+ registers/ { for (i = 1; i < NF; ++i) if ($i == "Used" && $(i + 1) > most) most = $(i + 1) }
        /bytes spill stores/ && $5 + $9 > 0 {
            ++spilling; bytes += $5
            if (name ~ /F16ValuesEEELi128E/) { print "cuda compile check: spills: " name; bad = 1 }
        }
        END {
            printf "cuda compile check: at most %d registers, %d functions spill, %d bytes\n", most, spilling, bytes
            exit bad
        }' "$1"
}

# Of csrc/weave/cuda, and of what tests compile with it, no warning is let through; ptxas' words about its kernels stay in a file.
compile() {
    local source=$1 object rc=0 started=$SECONDS
    shift
    object=$objects/$(echo "$source" | tr / _)
    case $source in
        csrc/weave/cuda/*.cu)
            "$@" -Xcompiler "-Wall,-Wextra" -Werror all-warnings -Xptxas -v "$source" -o "$object.o" 2>"$object.log" || rc=1
            grep -v '^ptxas info\|bytes stack frame' "$object.log" >&2 || true
            [ $rc = 1 ] || report_registers "$object.log" || rc=1
            ;;
        csrc/weave/cuda/* | tests/native/*) "$@" -Xcompiler "-Wall,-Wextra" -Werror all-warnings "$source" -o "$object.o" || rc=1 ;;
        *) "$@" "$source" -o "$object.o" || rc=1 ;;
    esac
    if [ $rc = 0 ]; then
        echo "cuda compile check: ok      $source ($((SECONDS - started)) s)"
    else
        echo "cuda compile check: FAILED  $source"
        return 1
    fi
}
export -f compile report_registers
export objects
printf '%s\0' "${sources[@]}" |
    xargs -0 -P "$(nproc)" -I '{}' bash -c 'compile "$@"' _ '{}' ${launcher:+"$launcher"} nvcc "${flags[@]}"
