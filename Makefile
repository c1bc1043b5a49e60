# Each target works alone on a machine that has Python 3.10-3.13 and nothing else: it makes .venv first.
#   make demo    plan a GPT for 16 GPUs on this machine, then train a small one on local processes
#   make test    every test or a sample of its rows, JOBS=2 files at a time; those on four processes come last
#   make exhaustive    the rows beyond the samples, and what takes longest; CI runs both
#   make fast    the tier that takes a minute                              make lint    ruff and mypy
#   make zoo     ten architectures planned and executed on four local processes
#   make rehearse  the first day on a GPU, every stage of it on this CPU at tiny sizes
#   make wheel   the wheel, built, installed apart from the checkout and used: files, a plan, two processes that train
#   make golden  writes the plans and programs of tests/golden anew, to be read as a diff
#   make validation DATA=folder    cost models against published measurements
#   make demo TORCH_INDEX=https://download.pytorch.org/whl/cpu      takes torch's CPU build

PYTHON ?= python3
TORCH_INDEX ?=
VENV ?= .venv
JOBS ?= 2
DATA ?= $(AUTOPAR_GROUNDTRUTH)

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TORCH := $(shell sed -n 's/^\(torch==[^ ]*\).*/\1/p' constraints.txt)
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
PYTEST := $(ONE_THREAD) $(BIN)/python -m pytest --numprocesses $(JOBS) --dist loadfile --no-loadscope-reorder

# Python keeps the bytecode of our modules and tests: the tests start hundreds of processes, a second each otherwise.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test exhaustive fast golden wheel zoo rehearse validation lint install clean

demo: $(STAMP)
	$(BIN)/autopar demo

test: $(STAMP)
	$(PYTEST) -m "not exhaustive"

exhaustive: $(STAMP)
	$(PYTEST) -m exhaustive

fast: $(STAMP)
	$(PYTEST) -m "not exhaustive and not slow and not distributed and not gpu"

golden: $(STAMP)
	$(ONE_THREAD) $(BIN)/python -m tests.golden --update

wheel: $(STAMP)
	PYTHON="$(abspath $(BIN))/python" .ci/wheel

zoo: $(STAMP)
	$(ONE_THREAD) $(BIN)/python -m benchmarks.zoo --ci --seconds 100

rehearse: $(STAMP)
	$(ONE_THREAD) $(BIN)/python -m benchmarks.gpu --rehearse --seconds 1800 --output build/rehearsal

validation: $(STAMP)
	$(ONE_THREAD) $(BIN)/python -m benchmarks.validation --data "$(DATA)"

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/mypy -p autopar -p benchmarks

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) "$(TORCH)"
	$(BIN)/python -m pip install --constraint constraints.txt --editable ".[test,hf]"
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
