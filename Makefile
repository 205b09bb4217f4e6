# Every target sets up what it needs. On a fresh Debian: apt-get install make python3 python3-venv

PYTHON ?= python3
VENV := .venv
# Tools run as modules: the scripts in bin/ name an absolute path and break when the clone is moved.
RUN := $(VENV)/bin/python -m
STAMP := $(VENV)/.installed
CONSTRAINTS := constraints.txt
TORCH := $(shell grep '^torch==' $(CONSTRAINTS))

PYTEST_ARGS ?=
BENCH_ARGS ?=
DEMO_ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help install demo test lint format bench build clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(STAMP)  ## create .venv with everything in it

# torch comes first and by its pinned version: resolved among the rest, another build of it could be chosen.
$(STAMP): pyproject.toml $(CONSTRAINTS)
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(RUN) pip install -c $(CONSTRAINTS) "$(TORCH)"
	$(RUN) pip install -c $(CONSTRAINTS) -e ".[dev,plot]"
	touch $@

demo: install  ## train a small GPT on two local CPU processes, in two to three minutes
	$(VENV)/bin/python examples/lm/demo.py $(DEMO_ARGS)

test: install lint  ## lint, then all tests; PYTEST_ARGS="-k layout" is passed on
	$(RUN) pytest $(PYTEST_ARGS)

lint: install  ## ruff and mypy
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(RUN) mypy

format: install  ## let ruff rewrite the sources
	$(RUN) ruff check --fix .
	$(RUN) ruff format .

bench: install  ## step time of each strategy; BENCH_ARGS is passed on
	$(VENV)/bin/python benchmarks/step_time.py $(BENCH_ARGS)

build: install  ## wheel and source distribution, into dist/
	$(RUN) build --no-isolation

clean:  ## remove what was built, cached or run; .venv stays
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis examples/lm/runs
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
