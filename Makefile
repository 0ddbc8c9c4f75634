# Two commands: `make quickstart` and `make test`. Both work from a bare checkout with Python 3.11+ and make.

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# The CPU build of torch comes without Triton; its kernels' logic is tested by its interpreter. Without dependencies, because
# a CUDA build of torch brings its own version, which then stays.
TRITON := triton==3.6.0

.PHONY: help quickstart test test-slow check format lint types clean

help:
	@echo "make quickstart   first result on this machine"
	@echo "make test         the test suite, in minutes"
	@echo "make test-slow    runs killed and resumed, and other tests that take longer"
	@echo "make check        format, lint, types, import direction, tests"
	@echo "make format       rewrite the sources in house format"

# Installs once; again only when the dependencies change.
$(INSTALLED): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "dapo needs Python 3.11 or newer; none was found. Set PYTHON=/path/to/python3.11"; exit 2; }
	@echo "Installing into $(VENV) (once; about 2 minutes and 1.6 GB with the CPU build of torch) ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@$(BIN)/python -m dapo.models.triton_support || $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps $(TRITON) \
		|| echo "No Triton for this platform: the tests of its kernels are left out."
	@touch $@

quickstart: $(INSTALLED)
	@$(BIN)/dapo quickstart

test: $(INSTALLED)
	@$(BIN)/python -m pytest -n 2 -m "not slow and not gpu"

test-slow: $(INSTALLED)
	@$(BIN)/python -m pytest -m "slow and not gpu" --timeout 1800

lint: $(INSTALLED)
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .

types: $(INSTALLED)
	@$(BIN)/mypy

check: lint types test

format: $(INSTALLED)
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis
