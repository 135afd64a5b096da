#!/usr/bin/env bash
# Builds the engine for a lent GPU here and packs it, for scripts/gpu_suite.sh there: a build there takes most of a short
# lease. It is built in a root with that machine's system (Ubuntu 24.04: compiler, libraries, Python 3.12) and CUDA's
# toolkit of this machine. Takes 35 minutes on two cores the first time, then five. Needs root and debootstrap.
#
# usage: scripts/gpu_engine.sh            result: build/gpu-suite/carried/engine.tar.xz.*, of HEAD
#        scripts/gpu_engine.sh --stamp    only the commit that results will name: after changes of Python files alone
#
# Environment: GPU_ROOT (the root, default build/gpu-root), CUDA_ARCH (default 90-real), WITH_BASELINE=1 (unpatched
# llama.cpp beside it, for tests that compare the two).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

root=$(realpath -m "${GPU_ROOT:-build/gpu-root}")
toolkit=$(realpath /usr/local/cuda)
carried=build/gpu-suite/carried
arch=${CUDA_ARCH:-90-real}
llama_cpp=third_party/llama.cpp
packages=python3.12,python3.12-dev,python3.12-venv,g++,make,git,ca-certificates,ccache,xz-utils,file

say() { printf 'gpu_engine: %s\n' "$*"; }

fail() {
    printf 'gpu_engine: error: %s\n' "$*" >&2
    exit 1
}

make_root() {
    [ ! -e "$root/.complete" ] || return 0
    say "Ubuntu 24.04 in $root"
    mkdir -p "$root"
    # Debian 12 has no package with Ubuntu's keys.
    debootstrap --variant=minbase --no-check-gpg --components=main,universe --include=$packages \
        noble "$root" http://archive.ubuntu.com/ubuntu /usr/share/debootstrap/scripts/gutsy
    mkdir -p "$root$toolkit" "$root/src"
    ln -sfn "$toolkit" "$root/usr/local/cuda"
    touch "$root/.complete"
}

# What runs in the root, with mounts of its own.
inside() {
    cp -L /etc/resolv.conf /etc/hosts "$root/etc/"
    cp -L /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/ca-certificates.crt"
    # shellcheck disable=SC2016 # expanded by the shell within
    unshare -m bash -c '
        set -e
        for folder in proc sys dev; do mount --rbind "/$folder" "$0/$folder"; done
        mount --bind "$1" "$0$1"
        [ -z "${PIP_FIND_LINKS:-}" ] || { mkdir -p "$0$PIP_FIND_LINKS"; mount --bind "$PIP_FIND_LINKS" "$0$PIP_FIND_LINKS"; }
        exec chroot "$0" /usr/bin/env -C /src/oallama HOME=/root PATH="/usr/local/cuda/bin:/usr/bin:/usr/sbin:/bin" bash -euc "$2"
    ' "$root" "$toolkit" "$1"
}

# The lent machine's processor is not known before: AVX-512 with VNNI and BF16, which the hosts of H100 and H200 have.
settings() {
    local kernels=(SSE42 AVX AVX2 FMA F16C BMI2 AVX512 AVX512_VBMI AVX512_VNNI AVX512_BF16)
    printf '%s ' -DCMAKE_CUDA_ARCHITECTURES="$arch" -DGGML_CUDA_NCCL=OFF -DGGML_NATIVE=OFF
    printf -- '-DGGML_%s=ON ' "${kernels[@]}"
}

# Results name it; there is no .git on the lent machine. Only the commit that the packed engine was built from, or one
# with the same sources.
stamp() {
    git diff --quiet "$(cat $carried/ENGINE_COMMIT)" HEAD -- CMakeLists.txt cmake csrc $llama_cpp ||
        fail "the packed engine has other sources than HEAD: run scripts/gpu_engine.sh"
    printf '{"commit": "%s", "changed_files": %s, "made": "%s"}\n' "$(git rev-parse HEAD)" \
        "$(git status --porcelain | wc -l)" "$(date -u +%FT%TZ)" >$carried/BUNDLE.json
}

if [ "${1:-}" = --stamp ]; then
    stamp
    exit
fi
[ "$(id -u)" = 0 ] || fail "needs root, for a root of another system"
command -v debootstrap >/dev/null || fail "needs debootstrap; as root: apt-get install debootstrap"
[ -x "$toolkit/bin/nvcc" ] || fail "no nvcc in $toolkit"
[ -z "$(git status --porcelain -- csrc cmake python $llama_cpp)" ] || say "changes that are not committed stay out"
make_root
[ -e "$root/src/oallama/.git" ] || git clone -q . "$root/src/oallama"
git -C "$root/src/oallama" fetch -q "$PWD" HEAD
git -C "$root/src/oallama" reset -q --hard FETCH_HEAD
mkdir -p "$root/src/oallama/$llama_cpp/.download" $carried
cp -ru $llama_cpp/.download/. "$root/src/oallama/$llama_cpp/.download/"
inside "
    export OALLAMA_CUDA=ON OALLAMA_VULKAN=OFF OALLAMA_RPC=ON OALLAMA_MPI=ON OALLAMA_EXTRAS=test,cluster
    export CMAKE_CUDA_COMPILER_LAUNCHER=ccache CMAKE_ARGS='$(settings)'
    scripts/setup.sh
    mkdir -p build/gpu-suite/kernels
    PYTHONPATH=tests .venv/bin/python bench/weave_cuda.py --build build/gpu-suite/kernels --arch sm_${arch%-real}
    mv build/gpu-suite/kernels/libweave_cuda.so build/gpu-suite/
    [ -z '${WITH_BASELINE:-}' ] || scripts/baseline.sh
    OUT=\$PWD/build/gpu-suite/out GPU_SUITE_PACK_ONLY=1 scripts/gpu_suite.sh --stage 1 pack
"
rm -f $carried/engine.tar.xz.*
cp "$root"/src/oallama/build/gpu-suite/out/engine.tar.xz.* $carried/
git -C "$root/src/oallama" rev-parse HEAD >$carried/ENGINE_COMMIT
stamp
say "$(du -cb $carried/engine.tar.xz.* | tail -n 1 | cut -f 1) bytes in $carried"
