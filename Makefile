# Everything that a person or CI runs; `make help` lists it.
#
# Set-up goes into .venv and is skipped when it is done. On a machine that brings its own torch and
# the other dependencies, name its interpreter and nothing is installed: make test-gpu PYTHON=python3

SHELL := bash
TORCH ?= torch==2.13.0
VENV := .venv
OUTPUTS := outputs
# Seconds that `make test-gpu` may take.
BUDGET_S ?= 420
# Threads that wait for work must not spin: on few cores they take the time of those that work.
export OMP_WAIT_POLICY ?= PASSIVE

ifeq ($(origin PYTHON),command line)
READY :=
else
PYTHON := $(VENV)/bin/python
READY := $(VENV)/.complete
endif

.DEFAULT_GOAL := help
.PHONY: help install quality test coverage test-full test-gpu demo validate claims check-tables check docs build clean ci

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

$(VENV)/.complete: pyproject.toml
	@echo "set-up 1/3: virtual environment in $(VENV)"; python3 -m venv $(VENV)
	@echo "set-up 2/3: $(TORCH)"; $(PYTHON) -m pip install -qq "$(TORCH)"
	@echo "set-up 3/3: poros-hf[dev,demo]"; $(PYTHON) -m pip install -qq --editable ".[dev,demo]"
	@touch $@

install: $(READY)  ## make .venv with every dependency

quality: $(READY)  ## lint, formatting, types, import contracts, spelling
	$(PYTHON) -m ruff check
	$(PYTHON) -m ruff format --check
	$(PYTHON) -m mypy
	$(PYTHON) -c "from importlinter.cli import lint_imports_command as main; main()"
	$(PYTHON) -c "import sys; from codespell_lib import main; sys.exit(main())"

test: quality docs  ## quality, then the tests that need no GPU: what CI runs
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest -n auto --dist loadfile

coverage: $(READY)  ## the same tests, and the lines that none of them reaches
	$(PYTHON) -m pytest --cov --cov-report=term-missing:skip-covered

test-full: $(READY)  ## as test, with the whole product of the parity matrix
	$(PYTHON) -m pytest -m "not gpu"

test-gpu: $(READY)  ## the tests that need a GPU, as an artifact; SELECT=part of them; no GPU, no pass
	$(PYTHON) -m validation.experiments.gpu_suite.run --budget-s $(BUDGET_S) $(SELECT:%=--select %)

demo: $(READY)  ## fine-tune SmolLM2, streamed and resident, and compare
	@$(PYTHON) recipes/demo.py --output $(OUTPUTS)/demo

validate: $(READY)  ## run ARM=name[,name] of the limit protocol; without ARM, list them
	$(PYTHON) -m validation.experiments.limit.run --arms "$(ARM)"

claims: $(READY)  ## recompute every published number from its artifacts; tables and figures from those
	$(PYTHON) -m validation.harness.aggregate
	$(PYTHON) -m validation.harness.render
	$(PYTHON) -m validation.figures.draw

check-tables: $(READY)  ## fail if a generated table or figure differs from the numbers
	$(PYTHON) -m validation.harness.render --check
	$(PYTHON) -m validation.figures.draw --check

check: quality check-tables  ## all that is checked without running a test

docs: $(READY)  ## the site, into site/; a link that leads nowhere fails
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --strict

build: $(READY)  ## the wheel, into dist/
	$(PYTHON) -m pip wheel --quiet --no-deps --wheel-dir dist .

clean:  ## remove what was built or written, but not .venv and models/
	rm -rf build dist site .coverage $(OUTPUTS) *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache

ci: test check-tables docs build  ## what has to pass before a change lands
