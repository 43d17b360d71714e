# `make train` and `make test` do all the set-up on a fresh machine: a virtual environment in .venv
# with the versions of constraints.txt.
#
#   make train ARGS="stage=2 model=tiny"
#   make test
#   make coverage
#   make restore-matrix
#   make precision-table
#   make report-table

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
ARGS ?=
WORKERS ?= 2
SOURCES := lightning_zero recipes tests conf cuda

.DEFAULT_GOAL := help
.PHONY: help setup train test tests lint format types coverage restore-matrix precision-table report-table clean

help:
	@sed -n 's/^#  *make/make/p' Makefile

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "constraints.txt needs Python 3.11 or newer: make PYTHON=...")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test,dev,cli,plot]'
	touch $@

train: $(STAMP)
	$(BIN)/python recipes/pretrain.py $(ARGS)

test: lint types tests

lint: $(STAMP)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)

format: $(STAMP)
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

types: $(STAMP)
	$(BIN)/mypy

# One thread a rank: the tests start several ranks on few cores. Two files of tests at a time: ranks
# wait for each other, and for what a test makes fail, more than they compute. In order of the files:
# the long ones are not the last.
tests: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

# The same tests, a quarter slower, with the lines that they have run.
coverage: ARGS += --cov --cov-report=term --cov-fail-under=90
coverage: tests

# Writes the README's table of checkpoints and their readers.
restore-matrix: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.distributed.test_restore_matrix --write

# Writes the README's table of dtypes.
precision-table: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.distributed.test_precision_table --write

# Runs the tests of users' reports and writes docs/user-reports.md.
report-table: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.distributed.reports.table --write

clean:
	rm -rf .venv build dist *.egg-info .coverage .coverage.* .mypy_cache .pytest_cache .ruff_cache
