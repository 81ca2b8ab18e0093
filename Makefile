# `make run` and `make test` need only Python 3.11+ with venv; both build .venv on first use.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The CPU build of torch where pip finds this exact version, else any torch the project accepts.
TORCH ?= torch==2.13.0

MINUTES ?= 60

# Each worker has half of the list and takes from the other one's end when it is done with its own:
# so the servers and models that tests of a file share are made once, seldom by both.
TWO_WORKERS := -n 2 --dist worksteal

# Huawei's PyTorch extension, whose operator schemas and shape functions `make test-npu` calls. It
# fits torch of the same version only, and lies in a venv of its own: where it is installed without
# CANN, a plain `import torch` fails.
TORCH_NPU ?= 2.13.0
VENV_NPU := .venv-npu

.PHONY: run test test-all test-exhaustive test-parallel test-npu soak lint clean

run: $(VENV)/.installed
	@$(BIN)/rorqual generate

# What protects most, in minutes. A run that takes more processor time fails: whatever is exhaustive
# goes to `make test-all`.
test: $(VENV)/.installed-test lint
	$(BIN)/python -m pytest $(TWO_WORKERS) --processor-minutes 8

# Everything; and of what `make test` leaves out (long emulations, compilers, matrices of cases) the
# first case of each test, without the longest: CI has half an hour.
test-all: $(VENV)/.installed-test lint test-npu
	$(BIN)/python -m pytest $(TWO_WORKERS) --exhaustive all

test-exhaustive: $(VENV)/.installed-test
	$(BIN)/python -m pytest $(TWO_WORKERS) --exhaustive first

# Every valid combination of parallel sizes on two and four local processes: minutes. `make test`
# runs a selection that covers every pair of settings. Launchers too: two hosts need root (network
# namespaces), Ray its package; else those tests are skipped.
test-parallel: $(VENV)/.installed-test
	$(BIN)/python -m pytest tests/parallel tests/engine/distributed \
		-m "full_matrix or not full_matrix"

# The Ascend backend without a device: torch_npu's real schemas and shapes, our own CPU operators.
# The libraries of CANN that it loads are stubs made here (tests/npu/stubs); needs gcc and binutils.
test-npu: $(VENV_NPU)/.installed
	LD_LIBRARY_PATH=$(CURDIR)/$(VENV_NPU)/cann TORCH_DEVICE_BACKEND_AUTOLOAD=0 PYTHONPATH=$(CURDIR) \
		$(VENV_NPU)/bin/python -m pytest -n 2 --dist loadfile --exhaustive all tests/npu

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
	@$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/pip install -q $(TORCH) || $(BIN)/pip install -q 'torch>=2.11,<2.15'
	@$(BIN)/pip install -q -e .
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	@$(BIN)/pip install -q -e '.[test,interpreter]' || $(BIN)/pip install -q -e '.[test]'
	@touch $@

# What the tests need is read from the ordinary venv; only torch_npu and what its graph compiler
# imports are added.
$(VENV_NPU)/.installed: $(VENV)/.installed-test $(wildcard tests/npu/stubs/*)
	@$(BIN)/python -c 'import torch, sys; sys.exit(torch.__version__.split("+")[0] != "$(TORCH_NPU)")' \
		|| { echo "torch-npu $(TORCH_NPU) needs torch $(TORCH_NPU) in $(VENV)"; exit 1; }
	@test -x $(VENV_NPU)/bin/python || $(BIN)/python -m venv $(VENV_NPU)
	@$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" \
		% sysconfig.get_path("purelib"))' > "$$($(VENV_NPU)/bin/python -c \
		'import sysconfig; print(sysconfig.get_path("purelib"))')/tests.pth"
	@$(VENV_NPU)/bin/pip install -q --no-deps torch-npu==$(TORCH_NPU)
	@$(VENV_NPU)/bin/pip install -q packaging protobuf attrs psutil decorator scipy
	@$(VENV_NPU)/bin/python tests/npu/stubs/build.py $(VENV_NPU)/cann
	@touch $@

clean:
	rm -rf $(VENV) $(VENV_NPU) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
