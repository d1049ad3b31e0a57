# Every verb (target) first creates what it needs: an environment in .venv, then a build in build/,
# which is installed into python/ampfuse. Later calls take seconds.
#
#   TORCH=2.15.0                another torch, in .venv-2.15.0, with a build in build-2.15.0
#   AMPFUSE_WITH_CUDA=OFF       no CUDA kernels; by default they are built for this machine's GPU
#   TORCH_CUDA_ARCH_LIST="8.6"  kernels for these GPUs; by default make test compiles for 9.0 and
#                               this machine's GPU, make wheel for all GPUs that torch supports
#   PYTHON=python3.12           the interpreter from which a new .venv is created

.DEFAULT_GOAL := help
PYTHON ?= python3
export TORCH ?=
export VENV := .venv$(addprefix -,$(TORCH))
BUILD := build$(addprefix -,$(TORCH))
BIN := $(VENV)/bin
READY := $(VENV)/.ready
export PATH := $(CURDIR)/$(BIN):$(PATH)
# Many containers forbid Python to write bytecode. Each process would then compile torch's Python
# files again, and take 3 s instead of 1.6 s to import torch.
unexport PYTHONDONTWRITEBYTECODE
export AMPFUSE_FETCH_NVCC ?= ON
override CMAKE_ARGS := -DAMPFUSE_BUILD_TESTS=ON -DAMPFUSE_BUILD_CUDA_HOST=ON $(CMAKE_ARGS)
export CMAKE_ARGS
export CTEST_PARALLEL_LEVEL ?= 2
# Two processes run the tests. All tests of a file run in one of them, since they share fixtures.
# Files with slow tests come first (conftest.py). OpenMP threads must not spin while they wait:
# spinning doubled the time. torch's compiler must not start worker processes of its own.
PYTEST_FLAGS ?= -n 2 --dist loadfile --no-loadscope-reorder
# tools/test_times.py reads these reports.
REPORTS := $(BUILD)/reports
PYTEST = $(BIN)/python -m pytest $(PYTEST_FLAGS) --junitxml=$(REPORTS)/$(1).xml
CTEST = $(BIN)/ctest --test-dir $(BUILD) --output-on-failure --no-tests=error \
	--output-junit $(CURDIR)/$(REPORTS)/ctest.xml
test test-fast test-frameworks test-one test-wheels: export OMP_WAIT_POLICY ?= passive
test test-fast test-frameworks test-one test-wheels: export TORCHINDUCTOR_COMPILE_THREADS ?= 1
# torch's compiler tries each instruction set of this CPU with a program, in half a minute.
test test-fast test-frameworks test-one test-wheels: export TORCHINDUCTOR_VEC_ISA_OK ?= 1
# The packaging tests compile copies of the sources. ccache compares paths relative to these
# folders, and so finds the objects again.
export CCACHE_DIR ?= $(CURDIR)/build/ccache
export AMPFUSE_SECOND_CHECKOUT := $(CURDIR)/$(BUILD)/packaging
BUILDS := $(BUILD) $(BUILD)/packaging/build $(BUILD)/packaging/wheel $(BUILD)/packaging/within \
	$(BUILD)/recipe/build
SOURCES := . $(BUILD)/packaging $(BUILD)/recipe
IN_BUILDS := $(foreach name,include batches CMakeFiles,$(BUILDS:%=$(CURDIR)/%/$(name)))
OWN_FOLDERS := $(foreach name,csrc tests,$(SOURCES:%=$(CURDIR)/%/$(name))) $(IN_BUILDS)
export CCACHE_BASEDIR := $(shell echo $(abspath $(OWN_FOLDERS)) | tr ' ' ':')
export CCACHE_NOHASHDIR := 1
# CMake writes the precompiled header's source a moment before it is compiled. ccache would take it
# for a source that changes during the compilation.
export CCACHE_SLOPPINESS := pch_defines,time_macros,include_file_mtime,include_file_ctime
# csrc/cmake/AmpfuseOwnSources.cmake writes what ccache reads instead of precompiled headers.
export CCACHE_PCH_EXTSUM := 1
BENCH_FLAGS ?= --quick
AVX512 := $(shell grep -m1 -o avx512f /proc/cpuinfo 2>/dev/null)

# Evaluated once, and only by the verbs that use it.
GPUS = $(eval GPUS := $(shell \
	nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | grep -x '[0-9.]*'))$(GPUS)

CXX_FILES = $(shell git ls-files --cached --others --exclude-standard \
	'*.h' '*.cpp' '*.cu' '*.cuh')

.NOTPARALLEL:
.PHONY: help demo test test-fast test-frameworks test-one test-wheels docs bench wheel wheels \
	lint format build cpp-headers clean

help:  ## list the verbs
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# The tests read the kernels' machine code, and run the kernels on the CPU, even without a GPU.
test test-frameworks: export TORCH_CUDA_ARCH_LIST ?= $(sort 9.0 $(GPUS))
# A wheel has CUDA kernels by default, since it is for other machines.
wheel: export AMPFUSE_WITH_CUDA ?= ON
wheels: export AMPFUSE_WITH_CUDA ?= OFF
demo bench wheel wheels: override CMAKE_ARGS += -DAMPFUSE_BUILD_TESTS=OFF
test test-fast test-frameworks test-one: export AMPFUSE_BUILD := $(BUILD)
test-fast: override CMAKE_ARGS += -DAMPFUSE_BUILD_CUDA_HOST=OFF

demo: build  ## train a language model in float32, with torch.amp and with ampfuse; draws demo.png
	@echo "demo: training a small language model four times (2 minutes on 2 cores)"
	@$(BIN)/python examples/demo.py

# Where a CPU has AVX-512, the tests of code that is compiled per instruction set run again as AVX2.
# They are no tests of torch.compile, whose kernels crash if torch assumes another CPU.
test: cpp-headers build  ## run every test
	@rm -rf $(REPORTS)
	$(call PYTEST,python)
ifneq ($(AVX512),)
	ATEN_CPU_CAPABILITY=avx2 $(call PYTEST,avx2) -m "vectorised and not slow" \
		$(addprefix tests/python/,losses ops optim)
endif
	$(CTEST)
	@$(BIN)/python tools/test_times.py --reports $(REPORTS) --budget

test-fast: cpp-headers build  ## leave out the slow tests and the sanitizer builds
	$(call PYTEST,fast) -m "$(or $(M),not slow)"
	$(CTEST)

test-frameworks: build  ## run the tests with Lightning, Accelerate, Transformers and others
	@$(PYTHON) tools/environment.py frameworks
	$(VENV)-frameworks/bin/python -m pytest $(PYTEST_FLAGS) \
		--junitxml=$(REPORTS)/frameworks.xml $(or $(T),tests/frameworks)

# A build folder that has the tests is not configured again, and only what the test needs is compiled:
# an edit to one .cpp is tested in seconds.
HAS_TESTS := $(filter 2,$(shell cat $(BUILD)/CMakeCache.txt 2>/dev/null | \
	grep -c -E '^AMPFUSE_BUILD_(TESTS|CUDA_HOST):BOOL=ON'))
test-one: $(if $(HAS_TESTS),,cpp-headers build)  ## run one test, T=tests/python/optim or T=test_cpp, after compiling what it needs
	$(if $(TORCH),$(error test-one: only for the torch in .venv; use make test-fast TORCH=$(TORCH)))
	$(if $(T),,$(error test-one: T: expected a test, as in make test-one T=tests/python/optim))
ifneq ($(findstring tests/python,$(T)),)
	@$(BIN)/cmake --build $(BUILD) --target ampfuse _C ampfuse_cpp
	@$(BIN)/cmake --install $(BUILD) >$(BUILD)/install.log
	@$(BIN)/python -m pytest -q $(T)
else
	@$(BIN)/cmake --build $(BUILD) --target $(T)
	@$(BIN)/ctest --test-dir $(BUILD) --output-on-failure --no-tests=error -R '^$(T)$$'
endif

docs:  ## build the documentation in build/site, without a compiled library
	@$(PYTHON) tools/environment.py docs
	@NO_MKDOCS_2_WARNING=1 $(VENV)-docs/bin/mkdocs build
	@echo "docs: build/site/index.html; with a search box: $(PYTHON) -m http.server -d build/site"

bench: build  ## compare with torch, quickly; BENCH_FLAGS= for all cases, BENCH_FLAGS=--help
	for bench in benchmarks/bench_*.py; do $(BIN)/python $$bench $(BENCH_FLAGS) || exit 1; done

lint: $(READY)  ## check formatting, types and the rules of the layout
	@$(BIN)/clang-format --dry-run -Werror $(CXX_FILES)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/python -m mypy
	$(BIN)/python -m pytest tests/python/project/test_layout.py

format: $(READY)  ## format the sources
	@$(BIN)/clang-format -i $(CXX_FILES)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

cpp-headers:
	@$(PYTHON) tools/environment.py cpp-headers

# $(call make_wheel,build folder,folder of the wheel). setuptools writes everything to the build
# folder. Beside the sources, its files would count as the installation for the default torch.
make_wheel = mkdir -p $(BUILD) && AMPFUSE_BUILD_DIR=$(1) $(BIN)/python -W ignore setup.py \
	--quiet egg_info --egg-base $(BUILD) build --build-base $(BUILD)/setuptools \
	bdist_wheel --bdist-dir $(BUILD)/bdist --dist-dir $(2)

# python/ampfuse holds the library for the default torch. For another torch, a wheel is installed.
build: $(READY)  ## compile the library and install it into python/ampfuse
	@echo "build: compiling what has changed (on 2 cores the library takes 2 minutes; CUDA kernels and"
	@echo "       C++ tests, where they are built, 5 more)"
ifeq ($(TORCH),)
	@$(BIN)/python setup.py --quiet build_ext --inplace
else
	@rm -rf $(BUILD)/dist
	@$(call make_wheel,$(BUILD),$(BUILD)/dist)
	@$(BIN)/python -m pip install --quiet --no-deps --no-index --force-reinstall $(BUILD)/dist/*.whl
endif

wheel: $(READY)  ## make a wheel in dist/, for this torch and this Python
	@$(call make_wheel,$(BUILD)/wheel,dist)
	@ls dist

OF_WHEELS = $(if $(RELEASES),--torch $(RELEASES)) $(if $(PYTHONS),--python $(PYTHONS))
test-wheels: cpp-headers $(READY)  ## test the wheels of make wheels with each torch; RELEASES="2.12.1"
	@$(BIN)/python tools/test_wheels.py $(OF_WHEELS)

wheels: $(READY)  ## make a wheel in dist/ for torch 2.11 to 2.15; PYTHONS="python3.10 python3.12"
	@$(BIN)/python tools/wheels.py $(OF_WHEELS)

clean:  ## remove what was built; environments stay
	rm -rf build build-* dist python/ampfuse/lib python/ampfuse/include python/ampfuse/share

$(READY): tools/environment.py pyproject.toml
	@$(PYTHON) tools/environment.py
