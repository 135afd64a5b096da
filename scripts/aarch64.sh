#!/usr/bin/env bash
# Compiles the engine for aarch64 and uses it in a Debian for arm64 that qemu emulates. docs/wheels.md.
#
# usage: scripts/aarch64.sh [root|build|try|test]...     default: root, build, try, in this order
#   root    a Debian 12 for arm64 with Python in build/aarch64/root (debootstrap)
#   build   libraries, llama-server and the other programs, into that root
#   try     the demo model writes, by a plan and without one
#   test    the tests that ARGS name, for example: ARGS="tests/engine/test_threads.py" scripts/aarch64.sh test
#
# Needs root, and: apt-get install debootstrap qemu-user-static g++-aarch64-linux-gnu
# Environment: ARM_ARCH (default armv8.6-a+dotprod+fp16+i8mm, as of 2020; what qemu emulates is no measure of speed)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

folder=$PWD/build/aarch64
root=$folder/root
export PATH="$PWD/.venv/bin:$PATH"

fail() {
    printf 'aarch64: error: %s\n' "$*" >&2
    exit 1
}

# The kernel starts programs for aarch64 by qemu, in a root that has no qemu, too.
emulate() {
    local magic='\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00'
    local mask='\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff'
    local formats=/proc/sys/fs/binfmt_misc
    [ -e $formats/register ] || mount -t binfmt_misc none $formats
    [ -e $formats/qemu-aarch64 ] || printf '%s' ":qemu-aarch64:M::$magic:$mask:$(command -v qemu-aarch64-static):F" >$formats/register
}

# inside COMMAND.., with mounts of its own, which end with it
inside() {
    emulate
    # shellcheck disable=SC2016 # $0 is the inner shell's
    unshare --mount --propagation private bash -euc '
        mount -t proc proc "$0/proc"
        mount --rbind /dev "$0/dev"
        mount --bind "$1" "$0/src"
        shift
        exec chroot "$0" /usr/bin/env -i PATH=/opt/venv/bin:/usr/bin:/bin HOME=/root LANG=C.UTF-8 \
            PIP_CERT=/etc/ssl/certs/ca-certificates.crt "$@"
    ' "$root" "$PWD" "$@"
}

root() {
    [ "$(id -u)" = 0 ] || fail "needs root for debootstrap and chroot"
    for program in debootstrap qemu-aarch64-static aarch64-linux-gnu-g++; do
        command -v $program >/dev/null || fail "no $program: apt-get install debootstrap qemu-user-static g++-aarch64-linux-gnu"
    done
    emulate
    mkdir -p "$folder"
    if [ ! -e "$root/opt/venv/bin/pip" ]; then
        rm -rf "$root"
        debootstrap --arch=arm64 --variant=minbase --include=python3-dev,python3-venv,ca-certificates,libgomp1 \
            bookworm "$root" >"$folder/debootstrap.log" 2>&1 || { tail -n 5 "$folder/debootstrap.log" >&2; fail "debootstrap failed"; }
        mkdir -p "$root/src"
        cp /etc/resolv.conf "$root/etc/resolv.conf"
        cp /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/"
        inside python3 -m venv /opt/venv
    fi
    # What pyproject.toml asks for, without the engine.
    python - <<'PYTHON' >"$root/requirements.txt"
import tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
print("\n".join(project["dependencies"] + project["optional-dependencies"]["test"]))
PYTHON
    inside pip install --quiet --no-cache-dir --only-binary :all: -r /requirements.txt
}

build() {
    local launcher=() site=$root/opt/venv/lib/python3.11/site-packages
    [ -e "$root/opt/venv/bin/pip" ] || fail "no $root; first: scripts/aarch64.sh root"
    command -v ccache >/dev/null && launcher=(-DCMAKE_C_COMPILER_LAUNCHER=ccache -DCMAKE_CXX_COMPILER_LAUNCHER=ccache)
    cmake -S . -B "$folder/engine" -G Ninja -DCMAKE_TOOLCHAIN_FILE="$PWD/cmake/aarch64.cmake" -DOALLAMA_ROOT="$root" \
        -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=OFF -DGGML_CPU_ARM_ARCH="${ARM_ARCH:-armv8.6-a+dotprod+fp16+i8mm}" \
        -DOALLAMA_CUDA=OFF -DOALLAMA_VULKAN=OFF -DOALLAMA_MPI=OFF -DPython_EXECUTABLE="$PWD/.venv/bin/python" \
        -Dpybind11_DIR="$(python -m pybind11 --cmakedir)" "${launcher[@]}" >"$folder/cmake.log"
    cmake --build "$folder/engine"
    rm -rf "$site/oallama"
    cp -r python/oallama "$site/oallama"
    cmake --install "$folder/engine" --component oallama --prefix "$site" >/dev/null
}

try() {
    local model=/opt/venv/lib/python3.11/site-packages/oallama/storyteller/storyteller-F16.gguf options
    inside oallama --version
    for options in --no-plan "--ctx 256"; do
        # shellcheck disable=SC2086 # words
        inside oallama run $model "One sunny day, Anna" -n 24 --temperature 0 $options
    done
}

# The tests of this checkout, with what is installed there.
test_() {
    local words
    read -ra words <<<"${ARGS:-}"
    [ ${#words[@]} -gt 0 ] || fail 'name the tests in ARGS'
    inside env -C /src python -m pytest -q -p no:cacheprovider "${words[@]}"
}

[ $# -gt 0 ] || set -- root build try
for step in "$@"; do
    case $step in
        root | build | try) $step ;;
        test) test_ ;;
        *) fail "unknown step $step; expected root, build, try or test" ;;
    esac
done
