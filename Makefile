# make train: set up and train the recipe `tiny`. make test: set up and run the tests.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: train test test-quick test-exhaustive test-oldest test-newest lint size format bench bench-plan bench-compiled faults docs schemas model-cards pictures docs-site lock clean

train: $(READY)
	$(BIN)/nanoscale train recipe=tiny

# Two workers take the tests of clusters first, which mostly wait; tests/support/schedule.py says how work is shared out.
# The rewritten assertions of the tests are kept, also where Python is told to keep no bytecode.
TESTS := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --numprocesses=4
# Each behavior once: about 15 minutes on two cores; the goal is ten.
test: $(READY)
	$(TESTS) $(PYTEST_ARGS)

# After each change: some of every room, without clusters.
test-quick: $(READY)
	$(TESTS) --numprocesses=2 -m "not cluster and not slow and not exhaustive" $(PYTEST_ARGS)

# What is left out above: all rows, with all steps and precisions.
test-exhaustive: $(READY)
	$(TESTS) --numprocesses=2 -m exhaustive $(PYTEST_ARGS)

# The quick tests and rehearsals in an environment of other versions.
define TESTS_IN
	$(1)/bin/python -m pytest --numprocesses=2 -m "not cluster and not slow and not exhaustive" $(PYTEST_ARGS)
	$(1)/bin/python -m pytest --numprocesses=2 tests/rehearse $(PYTEST_ARGS)
endef

# With the lowest versions that pyproject.toml admits.
OLDEST := build/oldest
test-oldest: $(OLDEST)/.ready
	$(call TESTS_IN,$(OLDEST))

$(OLDEST)/.ready: $(READY) pyproject.toml
	$(PYTHON) -m venv $(OLDEST)
	$(BIN)/python dev/admitted.py lowest > $(OLDEST)/requirements.txt
	$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check --requirement $(OLDEST)/requirements.txt
	$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $(OLDEST)/.ready

# With the newest ones, as a user installs them today; pip upgrades them each time. On Linux this is the CUDA build of torch,
# which needs no GPU for this: about 7 GB, of which 5 GB are downloaded.
NEWEST := build/newest
test-newest: $(READY)
	$(PYTHON) -m venv $(NEWEST)
	$(BIN)/python dev/admitted.py ranges > $(NEWEST)/requirements.txt
	$(NEWEST)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade --upgrade-strategy eager --requirement $(NEWEST)/requirements.txt
	$(NEWEST)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	$(call TESTS_IN,$(NEWEST))

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python dev/docstrings.py

# Lines and tokens of Python by folder, and what differs from main; the standard library suffices.
size:
	@$(PYTHON) dev/size.py

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# All of it, or some: make bench PARTS='start step'
bench: $(READY)
	$(BIN)/python -m benchmarks.cpu $(PARTS)

# The planner against published measurements.
bench-plan: $(READY)
	$(BIN)/python -m benchmarks.plan

# Predictions for benchmarks/gpu from code that is compiled for GPUs which are not here; some minutes a GPU.
CLUSTERS := h100-sxm b200 mi300x h200
bench-compiled: $(READY)
	$(BIN)/python -m benchmarks.gpu.predictions $(CLUSTERS)

# docs/faults.md, as measured here; some minutes, and only for root.
faults: $(READY)
	$(BIN)/python dev/faults.py

# With the environment if it exists; otherwise `PYTHON` needs PyYAML.
docs:
	PYTHONPATH=. $(or $(wildcard $(BIN)/python),$(PYTHON)) dev/reference.py

# docs/schemas, from documents that commands print here; half a minute.
schemas: $(READY)
	$(BIN)/python dev/schemas.py

# docs/model-cards.md: the cards of types that have none yet, one after another; stop it at any time.
model-cards: $(READY)
	$(BIN)/python dev/model_cards.py

# docs/pictures, from real plans and trainings on a terminal; about a minute.
pictures: $(READY)
	$(BIN)/python dev/pictures.py

# The documentation site, in build/site; its programs have an environment of their own. Only installing them needs the
# network. The site loads nothing from elsewhere, and its search works on files too.
SITE := build/site-tools
docs-site: $(SITE)/.ready
	rm -rf build/site-pages build/site
	mkdir -p build/site-pages/tests
	cp -r README.md CHANGELOG.md AGENTS.md LICENSE CITATION.cff docs examples build/site-pages
	cp tests/README.md build/site-pages/tests
	rm build/site-pages/docs/requirements.txt
	NO_MKDOCS_2_WARNING=1 $(SITE)/bin/python -m mkdocs build --quiet --strict
	! grep -rE '<(script|img|source|iframe)[^>]* src(set)?="?(https?:)?//|<link[^>]* href="?(https?:)?//' build/site --include='*.html'
	! grep -rE '(url\(|@import )["'"'"']?(https?:)?//' build/site --include='*.css'
	@echo "open build/site/index.html"

$(SITE)/.ready: docs/requirements.txt
	$(PYTHON) -m venv $(SITE)
	$(SITE)/bin/python -m pip install --quiet --disable-pip-version-check --requirement docs/requirements.txt
	touch $(SITE)/.ready

# The exact versions that everything here was tested with; nanoscale itself is installed in place.
$(READY): requirements.lock pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "nanoscale needs Python 3.11 or newer; try: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --requirement requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $(READY)

# Write down what is installed now, after a range in pyproject.toml has changed.
lock:
	$(BIN)/python dev/lock.py > requirements.lock.new
	mv requirements.lock.new requirements.lock

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache
