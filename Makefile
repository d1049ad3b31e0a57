# Every verb sets up what it needs: an environment in .venv, then a build in build/ that is installed
# into python/ampfuse. The second time takes seconds.
#
#   TORCH=2.15.0                another torch, in .venv-2.15.0, with a build in build-2.15.0
#   AMPFUSE_WITH_CUDA=OFF       no kernels for GPUs; by default there are those for the GPU here
#   TORCH_CUDA_ARCH_LIST="8.6"  kernels for these GPUs; make test compiles for 8.0 and 9.0 by default
#   PYTHON=python3.12           the interpreter .venv is made from, when there is none yet

.DEFAULT_GOAL := help
PYTHON ?= python3
export TORCH ?=
export VENV := .venv$(addprefix -,$(TORCH))
BUILD := build$(addprefix -,$(TORCH))
BIN := $(VENV)/bin
READY := $(VENV)/.ready
export PATH := $(CURDIR)/$(BIN):$(PATH)
export AMPFUSE_FETCH_NVCC ?= ON
export CMAKE_ARGS ?= -DAMPFUSE_BUILD_TESTS=ON -DAMPFUSE_BUILD_CUDA_HOST=ON
export CTEST_PARALLEL_LEVEL ?= 2
# Two processes, each with files of tests of its own, which share what a file makes once. Threads of
# theirs that spin while they wait would take the cores from each other: tests took twice as long.
# Nor does torch's compiler start processes of its own.
PYTEST_FLAGS ?= -n 2 --dist loadfile
test test-fast: export OMP_WAIT_POLICY ?= passive
test test-fast: export TORCHINDUCTOR_COMPILE_THREADS ?= 1
# What the packaging tests build, in a copy of this checkout, was compiled here before: of paths into
# these folders ccache looks at what follows alone.
export CCACHE_DIR ?= $(CURDIR)/build/ccache
export AMPFUSE_SECOND_CHECKOUT := $(CURDIR)/$(BUILD)/packaging
BUILDS := $(BUILD) $(BUILD)/packaging/build $(BUILD)/packaging/wheel
SOURCES := . $(BUILD)/packaging
IN_BUILDS := $(foreach name,include batches CMakeFiles,$(BUILDS:%=$(CURDIR)/%/$(name)))
OWN_FOLDERS := $(SOURCES:%=$(CURDIR)/%/csrc) $(IN_BUILDS)
export CCACHE_BASEDIR := $(shell echo $(abspath $(OWN_FOLDERS)) | tr ' ' ':')
export CCACHE_NOHASHDIR := 1
# The precompiled header's source is as new as the configuration that wrote it, a moment before.
export CCACHE_SLOPPINESS := pch_defines,time_macros,include_file_mtime,include_file_ctime
BENCH_FLAGS ?= --quick
# Tests of what is compiled once per instruction set run again as on a CPU without AVX-512. The
# compiler is left out, whose own kernels crash when told of another CPU than it runs on.
VECTORISED := $(foreach subject,clip_grad cross_entropy fused_adam linear_cross_entropy multi_tensor \
	optim_masters optim_written_params,$(wildcard tests/python/test_$(subject)*.py))
AVX512 := $(shell grep -m1 -o avx512f /proc/cpuinfo 2>/dev/null)

GPUS := $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | grep -x '[0-9.]*')

CXX_FILES = $(shell git ls-files --cached --others --exclude-standard \
	'*.h' '*.cpp' '*.cu' '*.cuh')

.NOTPARALLEL:
.PHONY: help demo test test-fast bench wheel lint format build catch2 clean

help:  ## list the verbs
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# Machine code is looked at, and kernels run on the CPU, where there is no GPU, too.
test: export TORCH_CUDA_ARCH_LIST ?= $(if $(GPUS),,8.0 9.0)
# What only runs needs no tests compiled.
demo bench wheel: export CMAKE_ARGS += -DAMPFUSE_BUILD_TESTS=OFF
test-fast: export CMAKE_ARGS += -DAMPFUSE_BUILD_CUDA_HOST=OFF

demo: build  ## train a language model in float32, with torch.amp and with ampfuse; draws demo.png
	@echo "demo: training a small language model four times (2 minutes on 2 cores)"
	@$(BIN)/python examples/demo.py

test: catch2 build  ## run every test
	$(BIN)/python -m pytest $(PYTEST_FLAGS)
ifneq ($(AVX512),)
	ATEN_CPU_CAPABILITY=avx2 $(BIN)/python -m pytest $(PYTEST_FLAGS) \
		-m "not slow" -k "not compile" $(VECTORISED)
	ATEN_CPU_CAPABILITY=avx2 $(BUILD)/tests/cpp/test_cpp
endif
	$(BIN)/ctest --test-dir $(BUILD) --output-on-failure --no-tests=error

test-fast: catch2 build  ## leave out the slow tests and the sanitizer builds
	$(BIN)/python -m pytest $(PYTEST_FLAGS) -m "not slow"
	$(BIN)/ctest --test-dir $(BUILD) --output-on-failure --no-tests=error

bench: build  ## compare with torch, quickly; BENCH_FLAGS= for all cases, BENCH_FLAGS=--help
	for bench in benchmarks/bench_*.py; do $(BIN)/python $$bench $(BENCH_FLAGS) || exit 1; done

lint: $(READY)  ## check formatting, types and the rules of the layout
	$(BIN)/clang-format --dry-run -Werror $(CXX_FILES)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/python/test_layout.py

format: $(READY)  ## format the sources
	$(BIN)/clang-format -i $(CXX_FILES)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

catch2:
	@$(PYTHON) tools/environment.py catch2

# Another torch's library would be in the way of the first in python/ampfuse: it is installed.
build: $(READY)  ## compile the library and install it into python/ampfuse
	@echo "build: compiling what has changed (all of it takes 2 minutes on 2 cores, kernels 5 more)"
ifeq ($(TORCH),)
	@$(BIN)/python setup.py --quiet build_ext --inplace
else
	@rm -rf $(BUILD)/dist
	@AMPFUSE_BUILD_DIR=$(BUILD) $(BIN)/python -W ignore setup.py --quiet bdist_wheel --dist-dir $(BUILD)/dist
	@$(BIN)/python -m pip install --quiet --no-deps --no-index --force-reinstall $(BUILD)/dist/*.whl
endif

wheel: $(READY)  ## make a wheel in dist/, for this torch and this Python
	@$(BIN)/python -W ignore setup.py --quiet bdist_wheel --dist-dir dist
	@ls dist

clean:  ## remove what was built; environments stay
	rm -rf build build-* dist python/ampfuse/lib python/ampfuse/include python/ampfuse/share \
		python/ampfuse/_C.*.so python/ampfuse/build_info.json

$(READY): tools/environment.py pyproject.toml
	@$(PYTHON) tools/environment.py
