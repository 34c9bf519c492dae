# A fresh clone needs only python3 >= 3.11 and make. The first run of `train` or `test` builds
# .venv; it is rebuilt when pyproject.toml changes, so later runs start at once.

PYTHON ?= python3
VENV   ?= .venv
ARGS   ?=
JOBS   ?= 2

BIN       := $(VENV)/bin
INSTALLED := $(VENV)/.installed

# OpenMP threads that spin while they wait make torch many times slower on a busy machine.
export OMP_WAIT_POLICY ?= passive
# Packages are installed without bytecode: unless the first import writes it, each of the many
# processes that tests start compiles all of torch again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help train test test-all lint docs clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 16

train: $(INSTALLED) ## train a reversible model on digits (ARGS="--help" lists the options)
	$(BIN)/python examples/train_compiled.py $(ARGS)

PYTEST = OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(JOBS) --dist loadfile

test: $(INSTALLED) ## the core of the tests, on JOBS processes (ARGS="tests/plan -k budget" runs some)
	$(PYTEST) $(ARGS)

test-all: $(INSTALLED) ## every test that needs no GPU (ARGS="-m slow" runs the slow ones alone)
	$(PYTEST) -m "not gpu" $(ARGS)

lint: $(INSTALLED) ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/.docs ## build the documentation site strictly, in site/
	$(BIN)/mkdocs build --strict

clean: ## remove the virtual environment and all caches
	rm -rf $(VENV) build dist site .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Of the 17,000 files that are installed few are ever imported: Python compiles those when they are.
$(INSTALLED): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
	  f"revcompile needs Python 3.11 or later, but $(PYTHON) is {sys.version.split()[0]}; run make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --editable '.[test,examples]'
	@touch $@

$(VENV)/.docs: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --editable '.[docs]'
	@touch $@
