# `make run` and `make test` need only Python 3.11+ with venv; both build .venv on first use.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The CPU build of torch where pip finds this exact version, else any torch the project accepts.
TORCH ?= torch==2.13.0

MINUTES ?= 60

.PHONY: run test test-all test-exhaustive test-parallel soak lint clean

run: $(VENV)/.installed
	@$(BIN)/rorqual generate

# What protects most, in minutes. A run that takes more processor time fails: whatever is exhaustive
# goes to `make test-all`.
test: $(VENV)/.installed-test lint
	$(BIN)/python -m pytest -n 2 --processor-minutes 8

# Everything; and what `make test` leaves out (long emulations, compilers, matrices of cases), but for
# a few of the longest, which stay test-all's alone: CI has half an hour.
test-all: $(VENV)/.installed-test lint
	$(BIN)/python -m pytest -n 2 --exhaustive all

test-exhaustive: $(VENV)/.installed-test
	$(BIN)/python -m pytest -n 2 --exhaustive only

# Every valid combination of parallel sizes on two and four local processes: minutes. `make test`
# runs a selection that covers every pair of settings. Launchers too: two hosts need root (network
# namespaces), Ray its package; else those tests are skipped.
test-parallel: $(VENV)/.installed-test
	$(BIN)/python -m pytest tests/parallel tests/engine/distributed \
		-m "full_matrix or not full_matrix"

# A server under mixed load for MINUTES; fails on a leak or a wrong answer. test-all has half a minute.
soak: $(VENV)/.installed-test
	$(BIN)/python tests/serve/soak.py --minutes $(MINUTES)

lint: $(VENV)/.installed-test
	$(BIN)/ruff check rorqual tests demo
	$(BIN)/ruff format --check rorqual tests demo
	$(BIN)/mypy

$(VENV)/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Rorqual needs Python 3.11 or newer"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { echo "python3-venv is missing: apt install python3-venv"; exit 1; }
	@$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/pip install -q $(TORCH) || $(BIN)/pip install -q 'torch>=2.11,<2.14'
	@$(BIN)/pip install -q -e .
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	@$(BIN)/pip install -q -e '.[test,interpreter]' || $(BIN)/pip install -q -e '.[test]'
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
