# `make demo`, `make check` and `make test` do all the set-up they need; see README.md. `make help` lists the targets.

.DEFAULT_GOAL := help
.NOTPARALLEL: # setup and engine build in one folder
.PHONY: help setup engine demo check test test-long test-all baseline lint bench bundle index clean

MODEL ?=
VRAM ?=
ARGS ?=
options = $(if $(VRAM),--vram "$(VRAM)") $(ARGS)
bin = .venv/bin
# One version everywhere: others format differently.
clang_format = $(or $(wildcard $(bin)/clang-format),clang-format)
clang_format_major = 14
# Tests at a time; those that measure time (`alone`) come after the others, one by one.
WORKERS ?= 2
pytest = $(bin)/python -m pytest -q $(ARGS)
beside = -n $(WORKERS) --dist worksteal
or_none = || [ $$? = 5 ] # ARGS may leave no test

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo '  MODEL=path.gguf VRAM=8GiB for demo and bench; ARGS="..." for demo, test and bench'

setup: ## system packages (as root), .venv, the engine with all programs; seconds when nothing changed
	@scripts/setup.sh

engine: ## as setup, without what `make demo` does not use: llama-server, other programs, Vulkan without a GPU
	@scripts/setup.sh demo

demo: engine baseline ## every step once, from a model to the TTFT/TPOT table
	@$(bin)/oallama demo --out build/demo $(if $(MODEL),--model "$(MODEL)") $(options)

check: lint ## linters, types, tests that need no engine: two minutes
	@$(pytest) tests/unit tests/planning tests/patches $(beside) -m "not engine and not slow"

test: setup baseline ## what a change can break on one machine: minutes; ARGS="-k placement" for some
	@$(pytest) $(beside) -m "not slow and not alone" $(or_none)
	@$(pytest) -m "alone and not slow" $(or_none)
	@if nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then $(pytest) -m cuda $(or_none); fi

test-long: setup baseline ## what `make test` leaves out: soaks, ThreadSanitizer, emulated networks, thousands of cases
	@$(pytest) $(beside) -m "slow and not alone" $(or_none)
	@$(pytest) -m "slow and alone" $(or_none)

test-all: test test-long ## all tests

baseline: engine ## unpatched llama.cpp from the same pin
	@scripts/baseline.sh

bench: engine baseline ## TTFT and TPOT of MODEL against llama.cpp
	@test -n "$(MODEL)" || { echo 'make bench: expected MODEL=path.gguf' >&2; exit 2; }
	@$(bin)/oallama bench "$(MODEL)" --baseline $(options)

lint: engine ## formatters, linters, types, the patch series
	$(bin)/ruff check .
	$(bin)/ruff format --check .
	$(bin)/mypy
	$(bin)/mypy --python-version 3.10 third_party/llama.cpp/upstream.py
	@if $(clang_format) --version 2>/dev/null | grep -q 'version $(clang_format_major)\.'; then \
		echo 'clang-format --dry-run -Werror csrc tests bench'; \
		find csrc tests bench -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh' | \
			xargs $(clang_format) --dry-run -Werror --style=file; \
	else echo 'clang-format: SKIPPED, version $(clang_format_major) is not here'; fi
	@if command -v shellcheck >/dev/null; then \
		echo 'shellcheck scripts .ci'; shellcheck scripts/*.sh .ci/run; \
	else echo 'shellcheck: SKIPPED, it is not here'; fi
	$(bin)/python third_party/llama.cpp/upstream.py check

bundle: setup ## one archive for a GPU host without network
	@scripts/bundle.sh

index: ## package index of the wheels in dist/, for any web server: build/index
	@python3 scripts/index.py

clean: ## what was built; keeps .venv, models and the download of llama.cpp
	rm -rf build dist
	find python csrc tests third_party/llama.cpp -maxdepth 3 -name __pycache__ -exec rm -rf {} +
