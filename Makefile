# make train: set up and train the recipe `tiny`. make test: set up and run every test.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: train test lint format bench bench-plan faults docs lock clean

train: $(READY)
	$(BIN)/nanoscale train recipe=tiny

# Tests of clusters mostly wait, so that two files at a time do; those with many ranks fill the cores; the others are light.
MANY_RANKS := $(addprefix tests/,backends checkpoint parallel train)
LIGHT := --ignore=tests/cluster $(MANY_RANKS:%=--ignore=%)
TWO := --numprocesses=2 --dist=loadfile
test: $(READY)
	$(BIN)/python -m pytest tests/cluster $(TWO) $(PYTEST_ARGS)
	$(BIN)/python -m pytest $(MANY_RANKS) $(PYTEST_ARGS)
	$(BIN)/python -m pytest $(LIGHT) $(TWO) $(PYTEST_ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# All of it, or some: make bench PARTS='start step'
bench: $(READY)
	$(BIN)/python -m scripts.bench $(PARTS)

# The planner against published measurements; PLAN_CSV is where they are.
bench-plan: $(READY)
	$(BIN)/python -m scripts.bench_plan $(PLAN_CSV)

# docs/faults.md, as measured here; some minutes, and only for root.
faults: $(READY)
	$(BIN)/python scripts/faults.py

docs: $(READY)
	$(BIN)/python scripts/reference.py

# The exact versions that everything here was tested with; nanoscale itself is installed in place.
$(READY): requirements.lock pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "nanoscale needs Python 3.11 or newer; try: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --requirement requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $(READY)

# Write down what is installed now, after a range in pyproject.toml has changed.
lock:
	$(BIN)/python scripts/lock.py > requirements.lock.new
	mv requirements.lock.new requirements.lock

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache
