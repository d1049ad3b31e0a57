#!/usr/bin/env bash
# Builds on a machine without a GPU what benchmarks/gpu.sh runs on one with a GPU, so that no GPU
# time is spent on compiling.
#
#   benchmarks/gpu_kit.sh                               # the library and its C++ tests, into build/kit
#   benchmarks/gpu_kit.sh base=main~5 rows=experiment   # and the library of other revisions
#   ARCH=8.0 PYTHON=python3.12 TORCH=2.11.0 benchmarks/gpu_kit.sh
#
# ARCH, PYTHON and TORCH are those of the machine with the GPU. Copy this checkout and build/kit
# there, and run benchmarks/gpu.sh. It tests the builds in build/kit instead of compiling, and times
# all of them against each other, with this checkout's as the first.
set -euo pipefail
cd "$(dirname "$0")/.."

kit=$PWD/build/kit
objects=$PWD/build/kit-objects
export TORCH=${TORCH:-2.11.0} PYTHON=${PYTHON:-python3.12}
export TORCH_CUDA_ARCH_LIST=${ARCH:-9.0} AMPFUSE_WITH_CUDA=ON AMPFUSE_FETCH_NVCC=ON
venv=$PWD/.venv-$TORCH
most_mib=60

# package NAME SOURCES: compiles the sources, and unpacks the wheel into the kit.
package() {
  local name=$1 sources=$2
  echo "gpu_kit: building $name"
  (
    cd "$sources"
    export PATH=$venv/bin:$PATH AMPFUSE_BUILD_DIR=$objects/$name
    mkdir -p "$AMPFUSE_BUILD_DIR" "$kit/$name"
    python -W ignore setup.py --quiet egg_info --egg-base "$AMPFUSE_BUILD_DIR" \
      build --build-base "$AMPFUSE_BUILD_DIR/setuptools" \
      bdist_wheel --bdist-dir "$AMPFUSE_BUILD_DIR/bdist" --dist-dir "$AMPFUSE_BUILD_DIR/dist"
    python -m zipfile --extract "$AMPFUSE_BUILD_DIR"/dist/*.whl "$kit/$name"
  )
}

for named in "$@"; do
  case $named in
    this=* | build=* | again=*) echo "gpu_kit: $named: this name is taken" >&2 && exit 1 ;;
    ?*=?*) git rev-parse --quiet --verify "${named#*=}^{commit}" >/dev/null || exit 1 ;;
    *) echo "gpu_kit: expected NAME=REVISION, got $named" >&2 && exit 1 ;;
  esac
done
rm -rf "$kit" "$objects"/*/dist
make --no-print-directory "$(basename "$venv")/.ready" cpp-headers
"$venv/bin/python" --version | grep -q "$("$PYTHON" --version)" || {
  echo "gpu_kit: $venv has another Python than $PYTHON: remove it" >&2
  exit 1
}

CMAKE_ARGS="-DAMPFUSE_BUILD_TESTS=ON -DAMPFUSE_BUILD_CUDA_HOST=OFF" package this "$PWD"
mkdir -p "$kit/build/tests/cpp"
cp "$objects"/this/tests/cpp/{test_cpp,ampfuse_cpp.*.so} "$kit/build/tests/cpp"
for named in "$@"; do
  sources=$objects/${named%%=*}-sources
  rm -rf "$sources"
  mkdir -p "$sources"
  git archive "${named#*=}" | tar -x -C "$sources"
  CMAKE_ARGS="-DAMPFUSE_BUILD_TESTS=OFF" package "${named%%=*}" "$sources"
done
rm -rf "$kit"/*/*.dist-info "$kit"/*/ampfuse/{include,share}

git describe --always --dirty >"$kit/revision" || echo "a folder without git" >"$kit/revision"
mib=$(du -sm "$kit" | cut -f1)
echo "gpu_kit: $kit has $mib MiB"
if ((mib > most_mib)); then
  echo "gpu_kit: more than $most_mib MiB: build fewer revisions" >&2
  exit 1
fi
