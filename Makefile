# Every target sets up what it needs. On a fresh Debian: apt-get install make python3 python3-venv

PYTHON ?= python3
VENV := .venv
# Tools run as modules: the scripts in bin/ name an absolute path and break when the clone is moved.
RUN := $(VENV)/bin/python -m
STAMP := $(VENV)/.installed
DOCS_STAMP := $(VENV)/.docs-installed
CONSTRAINTS := constraints.txt
TORCH := $(shell grep '^torch==' $(CONSTRAINTS))
# With TORCH in the place of its own, and what only it asks for left to it: another is tried by VENV=.venv-2.11 TORCH=torch==2.11.0.
PINS := $(VENV)/.constraints.txt

PYTEST_ARGS ?=
# Processes that share the tests, each with some 2 GB for ranks of its own; 0 for one, in which a debugger works.
WORKERS ?= 2
PYTEST = $(RUN) pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
# Parts of the names of deliberate faults; all by default.
FAULTS ?=
LIGHTNING ?=
# zero1_custom, zero2_custom or ddp_tuned; ddp is the stock strategy in the same places, to compare with.
LIGHTNING_STRATEGY ?= zero1_custom
LIGHTNING_TESTS ?= core/test_lightning_optimizer.py trainer/optimization trainer/connectors/test_checkpoint_connector.py \
	models/test_hooks.py models/test_amp.py models/test_restore.py plugins/precision/test_amp_integration.py \
	plugins/test_amp_plugins.py plugins/test_async_checkpoint.py plugins/test_checkpoint_io_plugin.py \
	callbacks/test_finetuning_callback.py callbacks/test_lr_monitor.py callbacks/test_weight_averaging.py \
	callbacks/test_stochastic_weight_avg.py callbacks/test_model_checkpoint_*.py checkpointing/test_model_checkpoint.py \
	checkpointing/test_checkpoint_callback_frequency.py checkpointing/test_torch_saving.py \
	checkpointing/test_trainer_checkpoint.py strategies/test_ddp.py
BENCH_ARGS ?=
SCALE_ARGS ?=
# For a machine that has torch and no network; Linux on x86, as its Python is.
GPU_WHEELS := gpu-wheels
GPU_PYTHON_VERSION ?= 3.12
GPU_WHEELS_MAX_MB := 64
GPU_ARGS ?=
DEMO_ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help install demo test test-slow test-cluster test-faults test-deliberate-faults test-lightning test-gpu gpu-wheels lint \
	format bench bench-gpu scale docs pictures build clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-22s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(STAMP)  ## create .venv with everything in it

$(PINS): $(CONSTRAINTS)
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	sed -e 's/^torch==.*/$(TORCH)/' -e '/^setuptools==/d' $(CONSTRAINTS) > $@

# torch comes first and by its pinned version: resolved among the rest, another build of it could be chosen.
$(STAMP): pyproject.toml $(PINS)
	$(RUN) pip install -c $(PINS) "$(TORCH)"
	$(RUN) pip install -c $(PINS) -e ".[dev]"
	touch $@

$(DOCS_STAMP): $(STAMP) $(PINS)
	$(RUN) pip install -c $(PINS) -e ".[docs]"
	touch $@

demo: install  ## train a small GPT on two local CPU processes, in two to three minutes
	$(VENV)/bin/python examples/lm/demo.py $(DEMO_ARGS)

test: install lint  ## lint, then all quick tests by two workers; PYTEST_ARGS="-k layout" is passed on, WORKERS=0 is one process
	$(PYTEST) -m "not slow and not cluster" $(PYTEST_ARGS)

test-slow: install  ## the tests that make test leaves out: what starts programs, kills them, or takes long
	$(PYTEST) -m "slow and not cluster and not alone" --ignore=tests/gpu $(PYTEST_ARGS)
	# What measures time, with no other worker beside it; 5 says that PYTEST_ARGS chooses none of it.
	$(RUN) pytest -m alone $(PYTEST_ARGS) || test $$? = 5

test-cluster: install  ## trainings under a real Slurm of two nodes, torchrun and mpirun; as root, installs what is missing
	tests/slurm/install.sh
	# Apart: where Lightning finds mpi4py, every training starts MPI.
	test -d $(VENV)/mpi || $(RUN) pip install --target $(VENV)/mpi mpi4py
	PARSTRAT_REQUIRE_CLUSTER=1 $(RUN) pytest -m cluster tests/slurm $(PYTEST_ARGS)

test-faults: install  ## kill 50 trainings, at named points and at random, and go on from what they left
	PARSTRAT_KILLS=$${PARSTRAT_KILLS:-50} $(RUN) pytest tests/faults $(PYTEST_ARGS)

test-deliberate-faults: install  ## put faults into a copy of the package, one by one, and demand that tests find them
	$(RUN) tests.deliberate_faults.run $(FAULTS)

test-lightning: install  ## Lightning's own tests on LIGHTNING_STRATEGY; LIGHTNING=a checkout of Lightning, of the version installed
	test -d "$(LIGHTNING)/tests/tests_pytorch" || { echo "LIGHTNING=$(LIGHTNING): no checkout of Lightning is there"; exit 1; }
	$(RUN) pip install -q -c $(PINS) cloudpickle scikit-learn tensorboard
	cd "$(LIGHTNING)/tests" && PYTHONPATH="$(CURDIR):$$PWD" "$(CURDIR)/$(VENV)/bin/python" -m pytest -p tests.lightning_suite.plugin \
		--ddp-is=$(LIGHTNING_STRATEGY) --single-devices $(PYTEST_ARGS) $(addprefix tests_pytorch/,$(LIGHTNING_TESTS))

# Needs nothing but $(PYTHON) with torch where the wheels are there.
test-gpu:  ## all tests that need a GPU, in under ten minutes, into a table; PYTHON=python3 has torch, or .venv; GPU_ARGS is passed on
	@if test -d $(GPU_WHEELS) && $(PYTHON) -c 'import importlib.util as u, sys; sys.exit(not u.find_spec("torch"))'; then \
		$(PYTHON) -m tests.gpu.run --wheels $(GPU_WHEELS) $(GPU_ARGS); \
	else \
		$(MAKE) install && $(RUN) tests.gpu.run $(GPU_ARGS); \
	fi

gpu-wheels: install  ## collect the package and what it needs beside torch, for a machine without network; GPU_PYTHON_VERSION=3.12
	rm -rf $(GPU_WHEELS)
	$(RUN) build --wheel --no-isolation --outdir $(GPU_WHEELS)
	$(RUN) pip download --no-deps --only-binary=:all: --dest $(GPU_WHEELS) -c $(CONSTRAINTS) -r tests/gpu/wheels.txt \
		--implementation cp --python-version $(GPU_PYTHON_VERSION) --platform any --platform manylinux_2_28_x86_64 \
		--platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64
	@size=$$(du -sm $(GPU_WHEELS) | cut -f1); echo "$(GPU_WHEELS): $$size MiB"; test $$size -le $(GPU_WHEELS_MAX_MB)

lint: install  ## ruff, mypy, and a check of the pages' English
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(RUN) mypy
	$(RUN) tests.plain_english

format: install  ## let ruff rewrite the sources
	$(RUN) ruff check --fix .
	$(RUN) ruff format .

bench: install  ## step time of each strategy; BENCH_ARGS is passed on
	$(RUN) benchmarks.step_time $(BENCH_ARGS)

# Neither installs nor downloads anything: the machine may have no network, and sources are enough.
bench-gpu:  ## step time, launches, host time and memory on a GPU, where there is one; BENCH_ARGS is passed on
	$(or $(wildcard $(VENV)/bin/python),$(PYTHON)) benchmarks/gpu/run.py --output benchmarks/results/gpu.json $(BENCH_ARGS)

scale: install  ## count what a training costs a played rank of 8 to 1,024; SCALE_ARGS is passed on
	$(RUN) benchmarks.scale.run --output benchmarks/results/scale_counts.json $(SCALE_ARGS)

docs: install $(DOCS_STAMP)  ## the pages in docs/ as a site, into site/; a broken link or reference is an error
	$(RUN) mkdocs build --strict --clean

pictures: install  ## draw the pictures in docs/pictures, and write the tables of numbers, from the result files
	$(VENV)/bin/python docs/make_pictures.py
	$(VENV)/bin/python docs/make_tables.py

build: install  ## wheel and source distribution, into dist/
	$(RUN) build --no-isolation

clean:  ## remove what was built, cached or run; .venv stays
	rm -rf build dist site gpu-wheels *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis examples/lm/runs
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
