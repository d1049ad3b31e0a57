# Every verb sets up what it needs: an environment in .venv, then a build in build/ that is installed
# into python/ampfuse. The second time takes seconds.
#
#   AMPFUSE_WITH_CUDA=OFF       do without nvcc, which is otherwise fetched where it is missing
#   TORCH_CUDA_ARCH_LIST="8.6"  compile for these GPUs; by default for the one here, else 8.0 and 9.0
#   PYTHON=python3.12           the interpreter .venv is made from, when there is none yet

PYTHON ?= python3
BIN := .venv/bin
export PATH := $(CURDIR)/$(BIN):$(PATH)
export AMPFUSE_WITH_CUDA ?= AUTO
READY := .venv/.ready-$(AMPFUSE_WITH_CUDA)
export CMAKE_ARGS ?= -DAMPFUSE_BUILD_TESTS=ON -DAMPFUSE_BUILD_CUDA_HOST=ON
export CTEST_PARALLEL_LEVEL ?= 2
# Two processes, each with files of tests of its own, which share what a file makes once.
PYTEST_FLAGS ?= -n 2 --dist loadfile
# What the packaging tests build, in a copy of this checkout, was compiled here before: of paths into
# these folders ccache looks at what follows alone.
export CCACHE_DIR ?= $(CURDIR)/build/ccache
COPY := $(CURDIR)/build/packaging
OWN_FOLDERS := $(CURDIR)/csrc $(CURDIR)/build/include $(COPY)/csrc $(COPY)/build/include $(COPY)/wheel/include
export CCACHE_BASEDIR := $(shell echo $(OWN_FOLDERS) | tr ' ' ':')
export CCACHE_NOHASHDIR := 1
BENCH_FLAGS ?= --quick
# Tests of what is compiled once per instruction set run again as on a CPU without AVX-512. The
# compiler is left out, whose own kernels crash when told of another CPU than it runs on.
VECTORISED := $(foreach subject,clip_grad cross_entropy fused_adam linear_cross_entropy multi_tensor \
	optim_masters optim_written_params,$(wildcard tests/python/test_$(subject)*.py))
AVX512 := $(shell grep -m1 -o avx512f /proc/cpuinfo 2>/dev/null)

GPUS := $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | grep -x '[0-9.]*' | sort -u)
# CUDA 13 compiles for 7.5 and newer.
OLD_GPUS := $(filter 3.% 5.% 6.% 7.0 7.2,$(GPUS))
ifneq ($(OLD_GPUS),)
$(info GPUs of compute capability $(OLD_GPUS) are left out: CUDA 13 starts at 7.5)
endif
GPUS := $(filter-out $(OLD_GPUS),$(GPUS))
export TORCH_CUDA_ARCH_LIST ?= $(if $(GPUS),$(GPUS),8.0 9.0)

CXX_FILES = $(shell git ls-files --cached --others --exclude-standard \
	'*.h' '*.cpp' '*.cu' '*.cuh')

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo test test-fast bench lint format build catch2 clean

help:  ## list the verbs
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# What only runs needs no tests compiled.
demo bench: export CMAKE_ARGS += -DAMPFUSE_BUILD_TESTS=OFF
test-fast: export CMAKE_ARGS += -DAMPFUSE_BUILD_CUDA_HOST=OFF

demo: build  ## train on handwritten digits in fp32, with torch's AMP and with ampfuse
	$(BIN)/python examples/digits.py

test: catch2 build  ## run every test
	$(BIN)/python -m pytest $(PYTEST_FLAGS)
ifneq ($(AVX512),)
	ATEN_CPU_CAPABILITY=avx2 $(BIN)/python -m pytest $(PYTEST_FLAGS) \
		-m "not slow" -k "not compile" $(VECTORISED)
	ATEN_CPU_CAPABILITY=avx2 build/tests/cpp/test_cpp
endif
	$(BIN)/ctest --test-dir build --output-on-failure --no-tests=error

test-fast: catch2 build  ## leave out the slow tests and the sanitizer builds
	$(BIN)/python -m pytest $(PYTEST_FLAGS) -m "not slow"
	$(BIN)/ctest --test-dir build --output-on-failure --no-tests=error

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

build: $(READY)  ## compile the library and install it into python/ampfuse
	$(BIN)/python setup.py --quiet build_ext --inplace

clean:  ## remove what was built; .venv stays
	rm -rf build dist python/ampfuse/lib python/ampfuse/include python/ampfuse/share \
		python/ampfuse/_C.*.so python/ampfuse/build_info.json

$(READY): tools/environment.py pyproject.toml
	$(PYTHON) tools/environment.py
