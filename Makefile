# `make run` and `make test` need nothing installed beforehand but Python 3.11+ with venv; both build .venv on first use.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The CPU build of torch where pip finds one of this exact version first; elsewhere any torch the project accepts.
TORCH ?= torch==2.13.0

.PHONY: run test test-parallel lint clean

run: $(VENV)/.installed
	@$(BIN)/rorqual generate

test: $(VENV)/.installed-test lint
	$(BIN)/python -m pytest -n 2

# Every valid combination of parallel sizes on two and four local processes: minutes. `make test` runs a choice with every pair of settings.
# Launchers too: two hosts need root (network namespaces), Ray its package; tests without them are skipped.
test-parallel: $(VENV)/.installed-test
	$(BIN)/python -m pytest tests/parallel $(addprefix tests/engine/test_,ranks.py launchers.py hosts.py ray.py) -m "full_matrix or not full_matrix"

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
