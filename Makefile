# Every target makes the environment it needs: on a fresh machine, `make demo` and `make test` work at once.

SHELL := bash
.ONESHELL:
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(CURDIR)/$(VENV)/bin
DEVICE := .venv-device
PIP := $(BIN)/python -m pip -qq
READY := $(VENV)/.ready
INSTALLED := build/installed
SOURCES := pyproject.toml $(shell find embrace_fx passes runtime -name __pycache__ -prune -o -print)

# An exact version: a machine that keeps a CPU-only file of it takes that one, where a range would fetch the newest
# release with all of CUDA.
TORCH := torch==2.13.0

# Three processes with a third of the tests each, until one has none left: a process's tests share its ranks. On two cores
# three take less time than two, because ranks wait for each other more than they compute.
SIDE_BY_SIDE := --numprocesses 3 --dist worksteal

##@ Use

.PHONY: demo
demo: $(READY) ## train a language model on 2 local ranks, embrace_fx next to DDP (results in build/demo)
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node 2 examples/compare.py --output build/demo

##@ Check

.PHONY: test
test: $(READY) ## run the tests, but for those marked `long`
	$(BIN)/python -m pytest $(SIDE_BY_SIDE)

.PHONY: test-all
test-all: $(READY) ## run every test; those of a GPU on emulated ones, where .venv-device has been made
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) -m ''
	if [ -e $(DEVICE)/.ready ]; then
	    $(MAKE) device
	else
	    echo "tests/gpu has been skipped: make device runs it, and downloads five gigabytes"
	fi

# torch's own build for CUDA, 5 GB, in an environment of its own: with stand-ins for CUDA's libraries in the place of a GPU.
EMULATED := $(DEVICE)/bin/python -m tests.support.emulated_cuda

.PHONY: device-brief
device-brief: $(DEVICE)/.ready ## run a part of the tests of a GPU on 2 emulated ones, with jitter; 5 GB, minutes
	$(EMULATED) --devices 2 --jitter-us 400 --seed 1 -m pytest -m '' tests/gpu \
	    -k 'memory or streams or copies or no_host_wait or found or deeds or brief or (nccl and 2d)'

.PHONY: device
device: $(DEVICE)/.ready ## run the tests of a GPU on 1, 2 and 4 emulated ones, with jitter and slow streams; 5 GB, an hour
	device() { $(EMULATED) "$$@"; }
	device --devices 4 -m pytest -m '' tests/gpu
	device --devices 1 -m pytest -m '' tests/gpu -k 'matrix or memory or streams or copies'
	device --devices 1 --triton -m pytest -m '' tests/gpu/test_kernels.py -k test_case
	for seed in 1 2 3; do
	    device --devices 2 --jitter-us 400 --seed $$seed -m pytest -m '' tests/gpu -k 'memory or streams or nccl or deeds'
	done
	for stream in 0 1 2 3 4 5; do
	    device --devices 2 --slow-stream $$stream -m pytest -m '' tests/gpu -k 'memory or (nccl and lstm)'
	done

.PHONY: lint
lint: $(READY) ## check code and format (ruff), and how docstrings begin
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m tests.support.docstrings

# mypy reads the installed wheel, as it does at a user's: only there are passes/ and runtime/ parts of embrace_fx. The
# links keep the source tree's own embrace_fx/ off the search path, and error messages keep the paths one edits.
.PHONY: types
types: $(INSTALLED)/.ready ## check types strictly (mypy), package, tests, examples and benchmarks
	@mkdir -p build/types
	ln -sfn ../../tests ../../examples ../../benchmarks build/types/
	cd build/types
	export PYTHONPATH=$(CURDIR)/$(INSTALLED)
	mypy() { $(BIN)/mypy --config-file ../../pyproject.toml --cache-dir ../mypy "$$@" \
	    | sed -E 's#^\S*installed/embrace_fx/((passes|runtime)/)#\1#; s#^\S*installed/##'; }
	failed=0
	mypy --package embrace_fx || failed=1
	mypy tests examples benchmarks || failed=1
	exit $$failed

.PHONY: layers
layers: $(INSTALLED)/.ready ## check that imports point down only (import-linter)
	@cd $(INSTALLED)
	PYTHONPATH=. $(BIN)/lint-imports --config ../../pyproject.toml --no-cache --no-logo

# Material's banner about its successor is no warning of ours.
.PHONY: docs
docs: $(READY) ## build the site from docs/ (build/site/index.html)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo "the site is in build/site/index.html; its search needs a server: python -m http.server --directory build/site"

.PHONY: format
format: $(READY) ## format the code, apply ruff's safe fixes
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

.PHONY: release
release: $(READY) ## build wheel and sdist, install the wheel anew, check it from a user's side (build/release)
	$(BIN)/python -m tests.release

.PHONY: matrix
matrix: $(READY) ## a short suite under each Python and each torch that can be had, gigabytes (build/matrix)
	$(BIN)/python -m tests.release.matrix --output benchmarks/results

.PHONY: soak
soak: $(READY) ## random loops and faults next to a reference: MINUTES=60, FAULTS=200, TABLES=20, SEED=1
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.soak --minutes $(or $(MINUTES),60) --seed $(or $(SEED),1)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.soak.faults --count $(or $(FAULTS),200) --seed $(or $(SEED),0)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.soak.tables --minutes $(or $(TABLES),20) --seed $(or $(SEED),0)

##@ Environment

.PHONY: device-env
device-env: $(DEVICE)/.ready ## make .venv-device: torch's build for CUDA, for machines without a GPU too; 5 GB

# Three equals signs: a machine's own CPU-only file of this version is another one.
$(DEVICE)/.ready: $(READY)
	$(BIN)/python -m venv $(DEVICE)
	PIP_FIND_LINKS= $(DEVICE)/bin/python -m pip -qq install --find-links= 'torch===2.13.0' 'nvidia-cuda-crt==13.0.*'
	$(DEVICE)/bin/python -m pip -qq install --editable '.[test]'
	touch $@

.PHONY: env
env: $(READY) ## make .venv, or bring it up to date with pyproject.toml

$(READY): pyproject.toml
	@for python in $(or $(PYTHON),python3.11 python3.12 python3.13); do
	    if "$$python" -c 'import ensurepip, venv' 2>/dev/null; then break; fi
	    python=
	done
	if [ -z "$$python" ]; then
	    echo "Python 3.11, 3.12 or 3.13 with its venv module is needed, and none was found. Install one, or name it: make env PYTHON=..." >&2
	    exit 1
	fi
	echo "making $(VENV) with $$("$$python" --version): $(TORCH), then the project and its tools; takes minutes"
	"$$python" -m venv $(VENV)
	$(PIP) install $(TORCH)
	echo "torch is there; now the project, its tests and tools"
	$(PIP) install --editable '.[test,dev,docs,triton]'
	touch $@

# setuptools adds to build/lib but never removes: without the first line a deleted module would live on in the wheel.
$(INSTALLED)/.ready: $(READY) $(SOURCES)
	@rm -rf build/lib build/wheel $(INSTALLED)
	$(PIP) wheel --no-deps --no-build-isolation --wheel-dir build/wheel .
	$(PIP) install --no-deps --target $(INSTALLED) build/wheel/*.whl
	touch $@

.PHONY: clean
clean: ## remove the environment and everything built
	rm -rf $(VENV) $(DEVICE) build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +

.PHONY: help
help: ## print this list
	@awk 'BEGIN { FS = ":.*## " } \
	    /^##@ / { printf "\n%s\n", substr($$0, 5) } \
	    /^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

##@ Measure

.PHONY: bench-quick
bench-quick: $(READY) ## compare systems on limited links: 4 ranks, two models, 5 minutes (benchmarks/results)
	$(BIN)/python -m benchmarks.lab quick --minutes 5

.PHONY: bench
bench: $(READY) bench-peers ## compare every system on every model, up to two hours a call; goes on where it was
	$(BIN)/python -m benchmarks.lab full --minutes 110

.PHONY: bench-peers
bench-peers: $(READY) ## make the environments of TorchRec and Horovod (build/peers), minutes
	benchmarks/peers/environments.sh $(BIN)/python $(TORCH)
