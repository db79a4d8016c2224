# make train     fresh machine -> environment, a trained model, its evaluation and a sample
# make test      fresh machine -> environment with the test tools, then the tests
# make check     format, lint, types, import direction: before every commit
# make docs      build/docs/index.html: these pages and the API; a dead link fails
# make nightly   what takes long: the combinations that `make test` leaves out, kill -9 fifty times,
#                a soak of 20,000 steps
# make gpu-test  the tests that need a GPU
# make bench-check  benchmarks beside the committed figures of the same hardware; names what got slower
# make bench     kernel benchmarks on this machine's GPU

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
CONFIG ?= configs/quickstart.py
WORKDIR ?= runs/quickstart
# What `make test` runs: files, folders, further options of pytest.
TESTS ?= tests
# As many workers as cores: on two cores two of them took 13.8 minutes, and three 16.6.
WORKERS ?= $(shell $(PYTHON) -c 'import os; print(os.cpu_count() or 1)')

# The CUDA build of jax is chosen when a GPU answers. Override: make train JAX_EXTRA=cuda12
JAX_EXTRA ?= $(shell nvidia-smi >/dev/null 2>&1 && echo cuda13)
# What was installed last: a change of requirements, of Python or of the jax build installs again.
STAMP_NAME := $(shell cat requirements.txt requirements-dev.txt | cksum | cut -d' ' -f1)-$(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')$(JAX_EXTRA)
RUN_STAMP := $(VENV)/.run-$(STAMP_NAME)
DEV_STAMP := $(VENV)/.dev-$(STAMP_NAME)

.PHONY: train test check docs format nightly gpu-test bench bench-check clean
.DEFAULT_GOAL := train

$(RUN_STAMP):
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt $(if $(JAX_EXTRA),"jax[$(JAX_EXTRA)]")
	touch $@

$(DEV_STAMP): $(RUN_STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	touch $@

train: $(RUN_STAMP)
	$(BIN)/python -m scmoe.train --config $(CONFIG) --workdir $(WORKDIR)
	$(BIN)/python -m scmoe.evaluate --workdir $(WORKDIR)
	$(BIN)/python -m scmoe.generate --workdir $(WORKDIR) --prompt "def main(" --max_new_tokens 200 --temperature 0.8
	@echo "everything was written to $(WORKDIR)"

test: $(DEV_STAMP)
	NPROC=16 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart=0 -m "not gpu and not nightly" $(TESTS)

check: $(DEV_STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/python -m pytest -q tests/test_architecture.py

docs: $(DEV_STAMP)
	$(BIN)/python -W ignore::ResourceWarning -m mkdocs build --strict --config-file docs/site/mkdocs.yml
	@echo "build/docs/index.html"

format: $(DEV_STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

nightly: $(DEV_STAMP)
	NPROC=16 $(BIN)/python -m pytest -n auto --dist loadfile -m "nightly" tests

# Compilation takes most of the time: processes beside each other share one GPU.
GPU_PROCESSES ?= 12
gpu-test: $(DEV_STAMP)
	$(BIN)/python -m pytest -m gpu -n $(GPU_PROCESSES) --dist load --maxschedchunk=1 tests/gpu

bench: $(RUN_STAMP)
	$(BIN)/python -m scmoe.bench.layer

bench-check: $(RUN_STAMP)
	$(BIN)/python experiments/bench_check/run.py

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache build *.egg-info
