PYTHON ?= python3
VENV ?= .venv
# Where several files pin a package, the first counts.
CONSTRAINTS ?= constraints.txt
# For make test-versions.
FLOOR_PYTHON ?= python3.12
NEWEST_PYTHON ?= python3.13
# Whatever has torch and Triton for the GPU: the verbs that need one install nothing.
GPU_PYTHON ?= python3
ARGS ?=

BIN := $(VENV)/bin
# The constraints keep every installation at tested versions, torch included. Python compiles what is imported, when it is.
INSTALL := $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c $(VENV)/constraints.txt
PYTEST := $(BIN)/python -m tests.run -n 2 --dist worksteal --timeout 300

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help demo test test-full test-machines test-models test-seeds test-versions versions test-gpu check format format-check lint types docs bench bench-gpu first-hour rehearsal warm-cache report kernels clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.has-cli  ## train a small language model four ways: what is gained on this machine, at what cost
	$(BIN)/python examples/train_lm.py $(ARGS)

test: $(VENV)/.has-test  ## run the tests; ARGS='-k name' narrows them
	$(PYTEST) $(ARGS)

test-full: $(VENV)/.has-test  ## run the whole numeric matrix
	$(PYTEST) --full --timeout 3600 $(ARGS)

test-machines: $(VENV)/.has-test  ## run the numeric tests as other processors would; ARGS='--machine sse'
	$(BIN)/python -m tests.machines $(ARGS)

test-seeds: $(VENV)/.has-test  ## run the numeric tests with 20 other seeds and count the alarms
	$(BIN)/python -m tests.machines --seeds 1-20 $(ARGS)

# torchaudio's compiled library is of another torch; its models need none.
test-models: $(VENV)/.has-test  ## convert models of other people's packages, installed aside; ARGS='timm --reasons'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --only-binary :all: \
		--target $(VENV)/foreign -r tests/foreign/packages.txt 2>/dev/null
	rm -rf $(VENV)/foreign/torchaudio/lib
	PYTHONPATH=$(CURDIR):$(VENV)/foreign $(BIN)/python -m tests.foreign $(ARGS)

test-versions:  ## run the tests with the oldest and the newest versions, in .venv-floor and .venv-newest
	@lines=; status=0; for set in floor=$(FLOOR_PYTHON) newest=$(NEWEST_PYTHON); do \
		name=$${set%%=*}; result=passed; \
		$(MAKE) --no-print-directory versions test VENV=.venv-$$name PYTHON=$${set#*=} \
			CONSTRAINTS="constraints/$$name.txt constraints.txt" || { result=failed; status=1; }; \
		lines="$$lines$$name $$result: $$(.venv-$$name/bin/python -m tests.versions 2>&1 | tail -n 1)\n"; \
	done; printf "$$lines"; exit $$status

versions: $(VENV)/.has-test  ## print what the tests run with: Python, torch, Triton, the processor
	@$(BIN)/python -m tests.versions

check: format-check lint types test docs  ## everything that has to pass

format: $(VENV)/.has-dev  ## rewrite the sources in the common format
	$(BIN)/ruff format
	$(BIN)/ruff check --fix-only

format-check: $(VENV)/.has-dev
	$(BIN)/ruff format --check

lint: $(VENV)/.has-dev  ## report style errors
	$(BIN)/ruff check

types: $(VENV)/.has-dev  ## check types, strictly
	$(BIN)/pyright --pythonpath $(BIN)/python

docs: $(VENV)/.has-docs  ## build docs/_build/html, warnings are errors
	$(BIN)/python -m sphinx --quiet --fresh-env --fail-on-warning --keep-going docs docs/_build/html

bench: $(VENV)/.has-bench  ## measure what a CPU can show; ARGS='host memory' are parts of it
	$(BIN)/python benchmarks/bench.py $(ARGS)

bench-gpu:  ## measure on a GPU beside the peers, in 8 minutes; needs torch and Triton in GPU_PYTHON
	PYTHONPATH=$(CURDIR) $(GPU_PYTHON) benchmarks/bench_gpu.py $(ARGS)

report: $(VENV)/.has-bench  ## draw the plots and tables of README and docs from what was measured
	$(BIN)/python benchmarks/report.py

test-gpu:  ## run what a GPU can run of the tests, at real sizes; needs pytest and hypothesis in GPU_PYTHON
	PYTHONPATH=$(CURDIR) $(GPU_PYTHON) -m pytest -q tests/gpu tests/kernels tests/fusions/triton $(ARGS)

first-hour:  ## everything a GPU settles, in three calls of five minutes; ARGS=1 is the first of them
	PYTHONPATH=$(CURDIR) $(GPU_PYTHON) benchmarks/first_hour.py $(ARGS)

warm-cache: $(VENV)/.has-bench  ## compile the kernels of the GPU's rows for sm_90 and pack them, to travel with the tree
	$(BIN)/python benchmarks/warm_cache.py pack $(ARGS)

rehearsal: $(VENV)/.has-test  ## run these calls here: rows are tiny and interpreted, tests are collected
	$(BIN)/python benchmarks/first_hour.py --rehearse --limit 200

kernels: $(VENV)/.has-bench  ## compile every kernel for GPUs that are not here
	$(BIN)/python benchmarks/kernels_table.py $(ARGS)

clean:  ## remove what was built; the environment stays
	rm -rf build dist docs/_build .hypothesis .pytest_cache .ruff_cache
	find seqfuse tests tools examples benchmarks docs -type d -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

# Without build isolation the backend comes from the constraints too.
$(VENV)/.has-pip: $(CONSTRAINTS)
	@echo "installing into $(VENV): minutes without a word where pip has nothing in its cache"
	$(PYTHON) -m venv $(VENV)
	awk -F == '/^[^#]/ && !seen[$$1]++' $(CONSTRAINTS) >$(VENV)/constraints.txt
	$(INSTALL) hatchling editables
	@touch $@

$(VENV)/.has-%: $(VENV)/.has-pip pyproject.toml
	$(INSTALL) --no-build-isolation -e '.[$*]'
	@touch $@
