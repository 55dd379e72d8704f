# make demo | test | check | test-all | fuzz | golden | bench | dist.  See README.md.

PYTHON ?= python3
VENV ?= .venv
# More arguments for pip, such as an index with CPU wheels of torch.
PIP_ARGS ?=
# Test processes; each runs on one thread.
JOBS ?= 2
# A rollout file for the demo: .jsonl, .jsonl.gz or .parquet.
ROLLOUTS ?=
# More arguments for the demo, the benchmark or pytest.
ARGS ?=
FUZZ_EXAMPLES ?= 500

BIN := $(VENV)/bin
RUN_TESTS := OMP_NUM_THREADS=1 $(BIN)/python -m pytest

.PHONY: demo test test-all check fuzz golden bench dist clean

demo: $(VENV)/.demo
	$(BIN)/python -m examples.train_step $(if $(ROLLOUTS),--rollouts "$(ROLLOUTS)") $(ARGS)

test: $(VENV)/.dev
	$(RUN_TESTS) -n $(JOBS) --dist worksteal -m "not slow" $(ARGS)

test-all: $(VENV)/.dev
	$(RUN_TESTS) -n $(JOBS) --dist worksteal $(ARGS)

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(RUN_TESTS) -q tests/test_layering.py

# Random trees and programs, many more of them than in `make test`, with a new seed each time.
fuzz: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz --cases $(FUZZ_EXAMPLES) $(ARGS)

# Writes the expected texts anew: read the diff before you commit it.
golden: $(VENV)/.dev
	UPDATE_GOLDEN=1 $(RUN_TESTS) -k golden $(ARGS)

bench: $(VENV)/.demo
	$(BIN)/python -m examples.bench.end_to_end $(ARGS)

dist: $(VENV)/.dev
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .

clean:
	rm -rf build dist out *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) -c constraints.txt -e ".[hf,parquet]"
	touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) -c constraints.txt -e ".[dev]"
	touch $@
