#!/usr/bin/env bash
# Builds, tests, sanitizes and measures ampfuse on a machine with a GPU, offline.
#
#   benchmarks/gpu.sh                                  # into benchmarks/results/<gpu-name>
#   OUT=/tmp/run STAGES="build bench" BENCH_FLAGS="" benchmarks/gpu.sh
#
# OUT          where the results go
# KIT          what benchmarks/gpu_kit.sh has built elsewhere; with it nothing is compiled here
# STAGES       some of: build pytest ctest sanitize compare bench; a later run may reuse a build.
#              compare times the builds of the kit against each other
# PYTEST_FLAGS for the tests, for example -k "cuda or not cpu" if a CPU was tested elsewhere
# BENCH_FLAGS  for every benchmark; the default is --quick, since all cases take longer than the rest
# BUDGET       seconds for everything; a stage gets its limit or the time left, whichever is less
# WHEELS       a folder of .whl files to use in addition to the installed packages
# DEVICE       cuda; with cpu this is a trial on a machine without a GPU
#
# Needs in python3 torch, pytest, hypothesis and expecttest, and without a kit nvcc, cmake, ninja,
# Catch2 and pybind11; pytest-xdist helps. A failed stage does not stop the next one; the exit status
# is 1 if any stage failed. After each stage OUT holds the results so far: summary.txt,
# compared.txt, benchmarks.csv (every benchmark's rows), plots.tar.gz and logs.tar.gz.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

stages=${STAGES:-build pytest ctest sanitize compare bench}
device=${DEVICE:-cuda}
kit=${KIT:-build/kit}
budget=${BUDGET:-570} # ten minutes, minus the time to pack the results
wheels=${WHEELS:-wheels}
pytest_flags=()
eval "pytest_flags=(${PYTEST_FLAGS-})"
read -ra bench_flags <<<"${BENCH_FLAGS---quick}"
gpu=$(nvidia-smi --query-gpu=name --format=csv,noheader | head -n 1)
gpu_slug=$(tr '[:upper:]' '[:lower:]' <<<"${gpu:-no-gpu}" | tr -cs 'a-z0-9\n' '-')
out=${OUT:-benchmarks/results/$gpu_slug}
scratch=$(mktemp -d)
logs=$scratch/logs
trap 'rm -rf "$scratch"' EXIT
mkdir -p "$out" "$logs" "$scratch/bench"

library=$PWD/python
if [[ -d $kit/this ]]; then
  kit=$(cd "$kit" && pwd)
  library=$kit/this
  export AMPFUSE_BUILD=$kit/build # where the tests look for the C++ programs
  stages=${stages/build/}
fi
export PYTHONPATH=$library:$scratch/site${PYTHONPATH:+:$PYTHONPATH}
# Without a GPU, tests fail instead of being skipped.
[[ $device == cuda ]] && export FAIL_WITHOUT_CUDA=1
export AMPFUSE_WITH_CUDA=ON CMAKE_ARGS="-DAMPFUSE_BUILD_TESTS=ON -DAMPFUSE_BUILD_CUDA_HOST=OFF"
export CMAKE_BUILD_PARALLEL_LEVEL=${CMAKE_BUILD_PARALLEL_LEVEL:-$(nproc)}
export TORCH_CUDA_ARCH_LIST=${TORCH_CUDA_ARCH_LIST:-$(python3 -c \
  'import torch; print("{}.{}".format(*torch.cuda.get_device_capability()))' || echo 9.0)}

failures=0
summary=()

left() { echo $((budget - SECONDS)); }

wanted() { [[ " $stages " == *" $1 "* ]]; }

# stage NAME LIMIT COMMAND...: runs the command with its output in a log, and records the outcome.
stage() {
  local name=$1 limit=$2 started=$SECONDS status outcome
  shift 2
  ((limit > $(left))) && limit=$(left)
  echo "=== $name (at most ${limit} s)"
  if ((limit <= 0)); then
    status=124
  else
    # INT lets Python finish its report; KILL follows if a process ignores INT.
    timeout --signal=INT --kill-after=15 "$limit" "$@" >"$logs/$name.log" 2>&1
    status=$?
  fi
  case $status in
    0) outcome=pass ;;
    124 | 137) outcome="FAIL (out of time)" ;;
    *) outcome="FAIL (exit $status)" ;;
  esac
  if ((status)); then
    failures=$((failures + 1))
    [[ -f $logs/$name.log ]] && tail -n 25 "$logs/$name.log"
  fi
  summary+=("$(printf '%-26s %5d s  %s' "$name" $((SECONDS - started)) "$outcome")")
  pack
}

# Prints the name of each tool that found errors or took too long.
sanitize() {
  local tool
  for tool in memcheck racecheck initcheck synccheck; do
    # Without torch's caching allocator each tensor is an allocation with bounds of its own.
    (PYTORCH_NO_CUDA_MEMORY_CACHING=1 timeout --signal=INT --kill-after=10 230 \
      compute-sanitizer --tool "$tool" --report-api-errors no --error-exitcode 1 \
      python3 -m pytest tests/python -q -p no:cacheprovider -m sanitizer \
      -k "cuda and not none and not sum" >"$logs/$tool.log" 2>&1 || echo "$tool") &
  done
  wait
}
no_complaints() { [[ -z $(sanitize | tee /dev/stderr) ]]; }
export -f sanitize no_complaints
export logs

environment() {
  date --iso-8601=seconds
  nvidia-smi
  nvcc --version
  cmake --version
  python3 -c 'import torch; print(torch.__config__.show()); print(torch.__version__)'
}

# Writes the results so far into OUT.
pack() {
  local csv=("$scratch"/bench/*.csv) png=("$scratch"/bench/*.png)
  # All benchmarks write the same columns: keep the first file's heading only.
  [[ -f ${csv[0]} ]] && awk 'FNR > 1 || NR == 1' "${csv[@]}" >"$out/benchmarks.csv"
  [[ -f ${png[0]} ]] && tar -czf "$out/plots.tar.gz" -C "$scratch/bench" "${png[@]##*/}"
  [[ -f $logs/compare.log ]] && cp "$logs/compare.log" "$out/compared.txt"
  tar -czf "$out/logs.tar.gz" -C "$scratch" logs
  {
    echo "${gpu:-no GPU}, $(date --iso-8601=minutes), ${SECONDS} s in all"
    [[ -f $kit/revision ]] && echo "built elsewhere, from $(<"$kit/revision")"
    printf '%s\n' "${summary[@]}"
    echo "$failures failed"
  } >"$out/summary.txt"
}

environment >"$logs/environment.log" 2>&1

if compgen -G "$wheels/*.whl" >/dev/null; then
  stage wheels 30 python3 -m pip install --no-index --no-deps --target "$scratch/site" \
    "$wheels"/*.whl
fi

if wanted build; then
  stage build 270 python3 setup.py build_ext --inplace
fi
if wanted pytest; then
  # Most tests run kernels of microseconds between seconds of Python: run them in parallel.
  workers=()
  python3 -c 'import xdist' 2>/dev/null && workers=(-n "$(($(nproc) * 3 / 4))" --dist worksteal)
  # The tests of installation use no GPU, and need a package index.
  stage pytest 400 env OMP_NUM_THREADS=2 python3 -m pytest tests/python -q --durations=20 \
    "${workers[@]}" "${pytest_flags[@]}" \
    --ignore tests/python/install
fi
if wanted ctest; then
  if [[ -d $kit/this ]]; then
    torch_lib=$(python3 -c 'import torch; print(torch.__path__[0] + "/lib")')
    stage ctest 90 env LD_LIBRARY_PATH="$library/ampfuse/lib:$torch_lib" \
      "$kit/build/tests/cpp/test_cpp"
  else
    stage ctest 90 ctest --test-dir build --output-on-failure --no-tests=error \
      --parallel "$(nproc)"
  fi
fi
if wanted sanitize; then
  stage sanitize 240 bash -c no_complaints
fi
if wanted compare && (($(find "$kit" -mindepth 2 -maxdepth 2 -name ampfuse 2>/dev/null | wc -l) > 1)); then
  builds=("this=$kit/this")
  for folder in "$kit"/*/ampfuse; do
    name=$(basename "$(dirname "$folder")")
    [[ $name != this ]] && builds+=("$name=$kit/$name")
  done
  stage compare 200 python3 benchmarks/compare.py "${builds[@]}" --runs 3 \
    --bench cross_entropy fused_adam multi_tensor -- --device "$device" --quick
fi
if wanted bench; then
  benches=(benchmarks/bench_*.py)
  for index in "${!benches[@]}"; do # the remaining benchmarks share the time left
    name=$(basename "${benches[index]}" .py)
    stage "$name" $(($(left) / (${#benches[@]} - index))) \
      python3 "${benches[index]}" --device "$device" --out "$scratch/bench" "${bench_flags[@]}"
  done
fi

pack
cat "$out/summary.txt"
((failures == 0))
