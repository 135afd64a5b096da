#!/usr/bin/env bash
# Builds the site of docs/ into build/site and fails on a broken link; mkdocs is in a virtual environment of its own.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=build/site-venv
[ -x "$venv/bin/mkdocs" ] || { python3 -m venv "$venv" && "$venv/bin/pip" install -q 'mkdocs-material>=9.5,<10'; }
NO_MKDOCS_2_WARNING=1 "$venv/bin/mkdocs" build "$@"
