#!/usr/bin/env bash
# Packs everything a GPU host without network needs into one archive below 40 MB: this checkout, patched and pristine
# llama.cpp without the backends that play no part there, wheels for its Python (BUNDLE_PYTHON, 3.12). What the host
# brings itself stays out: nvcc, a C++ compiler, Python with pip, numpy, scipy, huggingface-hub, cmake.
#
# usage: scripts/bundle.sh [FILE]        (default build/oallama-bundle.tar.xz)
# there: python3 -m tarfile -e oallama-bundle.tar.xz . && cd oallama && scripts/gpu_suite.sh 1
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bundle=${1:-build/oallama-bundle.tar.xz}
max_bytes=40000000
llama_cpp=third_party/llama.cpp
wheels=build/wheels

say() { printf 'bundle: %s\n' "$*"; }

fail() {
    printf 'bundle: error: %s\n' "$*" >&2
    exit 1
}

# NAME==VERSION of everything that we, our tests and our build need, as installed in .venv, without the subtrees that
# the host brings.
requirements() {
    .venv/bin/python - <<'PYTHON'
import importlib.metadata as metadata
from packaging.requirements import Requirement

on_host = {"numpy", "scipy", "huggingface-hub"}
todo = [Requirement(text) for text in ("oallama[test,cluster]", "scikit-build-core", "pybind11", "ninja")]
seen = set()
while todo:
    requirement = todo.pop()
    name = requirement.name.lower().replace("_", "-")
    extras = requirement.extras or {""}
    if name in on_host or (name, *sorted(extras)) in seen:
        continue
    if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
        continue
    seen.add((name, *sorted(extras)))
    if name != "oallama":
        print(f"{name}=={metadata.version(name)}")
    for text in metadata.requires(name) or []:
        child = Requirement(text)
        if child.marker is None or any(child.marker.evaluate({"extra": extra}) for extra in extras):
            child.marker = None
            todo.append(child)
PYTHON
}

fetch_wheels() {
    local names version=${BUNDLE_PYTHON:-3.12}
    names=$(requirements | sort -u) || fail "cannot list what oallama needs; run: make setup"
    if [ "$(cat $wheels/.requirements 2>/dev/null)" = "$version $names" ]; then
        return
    fi
    say "wheels: $(echo "$names" | wc -l) packages"
    rm -rf $wheels
    mkdir -p $wheels
    # shellcheck disable=SC2086 # one argument per requirement
    .venv/bin/python -m pip download --quiet --no-deps --only-binary=:all: --dest $wheels \
        --python-version "$version" --implementation cp --platform manylinux_2_28_x86_64 \
        --platform manylinux_2_27_x86_64 --platform manylinux_2_24_x86_64 --platform manylinux_2_17_x86_64 \
        --platform manylinux2014_x86_64 --platform manylinux_2_12_x86_64 --platform manylinux2010_x86_64 \
        --platform manylinux_2_5_x86_64 --platform manylinux1_x86_64 $names
    echo "$version $names" >$wheels/.requirements
}

# Copies patched/ or upstream/ without what the GPU host does not build. The stamp goes along, so that
# `upstream.py prepare` there finds its work done and needs neither git nor network.
trimmed() {
    local tree=$llama_cpp/$1 skip=()
    local backend
    for backend in "$tree"/ggml/src/ggml-*/; do
        case $(basename "$backend") in
            ggml-cpu | ggml-cuda | ggml-rpc) ;;
            *) skip+=(--exclude="${backend%/}") ;;
        esac
    done
    tar -c "${skip[@]}" --exclude="$tree/tools/mtmd/test-*.*" --exclude="$tree/tools/mtmd/tests" \
        "$tree" | tar -x -C "$stage/oallama"
}

fetch_wheels
.venv/bin/python $llama_cpp/upstream.py fetch >/dev/null
.venv/bin/python $llama_cpp/upstream.py prepare >/dev/null
stage=$(mktemp -d build/bundle-XXXXXX)
trap 'rm -rf "$stage"' EXIT
mkdir "$stage/oallama"
# Files in git and those about to be: what is tried on a GPU is often not committed yet. Older results and pictures stay.
git ls-files -z --cached --others --exclude-standard -- . ':!bench/results' ':!docs/pictures' | while IFS= read -r -d '' path; do
    if [ -e "$path" ]; then printf '%s\0' "$path"; fi
done | tar -c --null -T - | tar -x -C "$stage/oallama"
trimmed upstream
trimmed patched
mkdir "$stage/oallama/$llama_cpp/.download"
cp -r $llama_cpp/.download/llama-cpp-python-tests "$stage/oallama/$llama_cpp/.download/"
mkdir "$stage/oallama/wheels"
cp $wheels/*.whl "$stage/oallama/wheels/"
printf '{"commit": "%s", "changed_files": %s, "made": "%s"}\n' "$(git rev-parse --verify -q HEAD || echo none)" \
    "$(git status --porcelain | wc -l)" "$(date -u +%FT%TZ)" >"$stage/oallama/BUNDLE.json"

# The two trees are nearly the same; xz's window of 64 MiB stores the second one once more for almost nothing.
say "compressing $(du -sh "$stage/oallama" | cut -f 1)"
mkdir -p "$(dirname "$bundle")"
tar -c --sort=name --owner=0 --group=0 -C "$stage" oallama | xz -6 --lzma2=preset=6,dict=64MiB -c >"$stage/bundle.xz"
bytes=$(stat -c %s "$stage/bundle.xz")
[ "$bytes" -lt $max_bytes ] || fail "$bytes bytes, must be below $max_bytes; $(du -sh "$stage"/oallama/* | sort -h | tail -n 3 | tr '\n\t' '; ')"
mv "$stage/bundle.xz" "$bundle"
say "$bundle, $((bytes / 1000)) kB"
