#!/usr/bin/env bash
# Builds, tests, sanitizes and measures ampfuse on a machine with a GPU, offline.
#
#   benchmarks/gpu.sh                                  # into benchmarks/results/<gpu-name>
#   OUT=/tmp/run STAGES="build bench" BENCH_FLAGS="" benchmarks/gpu.sh
#
# Two calls of six minutes, with a kit:
#
#   BUDGET=340 STAGES="first pytest ctest sanitize" benchmarks/gpu.sh
#   BUDGET=340 STAGES="compare bench" VARIANTS=whole_rows \
#     COMPARE="--runs 3 --bench cross_entropy -- --cases train/*x50257/float32" benchmarks/gpu.sh
#
# The variant held_twice is for train/*/bfloat16 of 257 to 16,384 classes, quick_floats for
# train/*/float32 of any number.
#
# OUT          where the results go
# KIT          what benchmarks/gpu_kit.sh has built elsewhere; with it nothing is compiled here
# STAGES       some of: build first pytest ctest sanitize compare bench; a later run may reuse a
#              build. first runs the tests that failed last, sanitize runs beside the tests, and
#              compare times the builds and variants of the kit against each other
# FIRST        more functions of tests for the stage first, for example those that are new
# VARIANTS     names for AMPFUSE_VARIANT, each compared with the build without it
# COMPARE      arguments of benchmarks/compare.py; the default compares quick cases of all kernels
# BENCHES      benchmarks in their order; the default begins with whole training steps, which may
#              take half of the time left
# PYTEST_FLAGS for the tests; the default runs those that need a GPU
# BENCH_FLAGS  for every benchmark; the default is --quick, since all cases take longer than the rest
# BUDGET       seconds for everything; a stage gets its limit or the time left, whichever is less
# WHEELS       a folder of .whl files to use in addition to the installed packages
# DEVICE       cuda; with cpu this is a trial on a machine without a GPU
#
# Needs in python3 torch, pytest, hypothesis and expecttest, and without a kit nvcc, cmake, ninja,
# Catch2 and pybind11; pytest-xdist helps. A failed stage does not stop the next one; the exit status
# is 1 if any stage failed. After each stage OUT holds the results so far: summary-HHMM.txt and
# logs-HHMM.tar.gz of the call that began then, compared.txt, benchmarks.csv (every benchmark's
# rows), plots.tar.gz, and after the stage pytest failed.txt: functions of tests, with which the
# stage first begins if the file is in benchmarks/results/*. It need not be a git checkout.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

known="build first pytest ctest sanitize compare bench"
stages=${STAGES:-$known}
for name in $stages "$@"; do
  [[ " $known " == *" $name "* && $# == 0 ]] && continue
  echo "gpu.sh: expected STAGES of $known and no arguments, got $stages $*" >&2
  exit 1
done
began=$(date +%H%M)
device=${DEVICE:-cuda}
kit=${KIT:-build/kit}
budget=${BUDGET:-570} # ten minutes, minus the time to pack the results
wheels=${WHEELS:-wheels}
read -ra variants <<<"${VARIANTS-}"
read -ra benches <<<"${BENCHES-training linear_cross_entropy cross_entropy fused_adam fused_sgd multi_tensor grad_scaler patched_step busy_cores}"
pytest_flags=()
eval "pytest_flags=(${PYTEST_FLAGS--m needs_cuda})"
read -ra bench_flags <<<"${BENCH_FLAGS---quick}"
gpu=$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | head -n 1)
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
  'import torch; print("{}.{}".format(*torch.cuda.get_device_capability()))' 2>/dev/null || echo 9.0)}

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

# Prints the name of each tool that found errors or took too long. Each tool runs in two processes,
# with every other file of the tests for sanitizers.
sanitize() {
  local tool half files index
  mapfile -t files < <(grep -lr "mark.sanitizer" tests/python | sort)
  for half in 0 1; do
    local some=()
    for index in "${!files[@]}"; do
      ((index % 2 == half)) && some+=("${files[index]}")
    done
    for tool in memcheck racecheck initcheck synccheck; do
      # Without torch's caching allocator each tensor is an allocation with bounds of its own.
      (PYTORCH_NO_CUDA_MEMORY_CACHING=1 timeout --signal=INT --kill-after=10 "$(($(left) - 15))" \
        compute-sanitizer --tool "$tool" --report-api-errors no --error-exitcode 1 \
        python3 -m pytest "${some[@]}" -q -p no:cacheprovider -m sanitizer \
        -k "cuda and not none and not sum" >"$logs/$tool$half.log" 2>&1 || echo "$tool") &
    done
  done
  wait
}

# Writes the functions of the tests that failed so far.
failed() {
  cat "$logs"/{first,pytest}.log 2>/dev/null | sed -n 's/^[FE][A-Z]* .*::\(test_[a-z0-9_]*\).*/\1/p' |
    sort -u
}

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
  [[ -f $logs/pytest.log ]] && failed >"$out/failed.txt"
  [[ -f $logs/compare.log ]] && cp "$logs/compare.log" "$out/compared.txt"
  tar -czf "$out/logs-$began.tar.gz" -C "$scratch" logs
  {
    echo "${gpu:-no GPU}, $(date --iso-8601=minutes), ${SECONDS} s in all"
    [[ -f $kit/revision ]] && echo "built elsewhere, from $(<"$kit/revision")"
    printf '%s\n' "${summary[@]}"
    echo "$failures failed"
  } >"$out/summary-$began.txt"
}

environment >"$logs/environment.log" 2>&1

if compgen -G "$wheels/*.whl" >/dev/null; then
  stage wheels 30 python3 -m pip install --no-index --no-deps --target "$scratch/site" \
    "$wheels"/*.whl
fi

if wanted build; then
  stage build 270 python3 setup.py build_ext --inplace
fi
if wanted sanitize; then
  (sanitize >"$logs/complaints.log" 2>&1 && touch "$scratch/sanitized") &
fi
# The tests of installation need a package index, and those of the layout a git checkout; neither
# uses a GPU.
tests=(python3 -m pytest tests/python -q --durations=20 -p no:cacheprovider
  --ignore tests/python/install --ignore tests/python/project/test_layout.py)
# Most tests run kernels of microseconds between seconds of Python: run them in parallel.
python3 -c 'import xdist' 2>/dev/null &&
  tests+=(-n "$(($(nproc) * 3 / 4))" --dist worksteal)
if wanted first; then
  read -ra names <<<"$(cat benchmarks/results/*/failed.txt | tr '\n' ' ') ${FIRST-}"
  stage first 100 env OMP_NUM_THREADS=2 "${tests[@]}" -m needs_cuda \
    -k "test_cross_entropy_cuda$(printf ' or %s' "${names[@]}")"
fi
if wanted pytest; then
  stage pytest "$(($(left) - 60))" env OMP_NUM_THREADS=2 "${tests[@]}" "${pytest_flags[@]}"
fi
if wanted ctest; then
  if [[ -d $kit/this ]]; then
    torch_lib=$(python3 -c 'import torch; print(torch.__path__[0] + "/lib")')
    stage ctest 90 env LD_LIBRARY_PATH="$(echo "$library"/ampfuse/lib/torch*):$torch_lib" \
      "$kit/build/tests/cpp/test_cpp"
  else
    stage ctest 90 ctest --test-dir build --output-on-failure --no-tests=error \
      --parallel "$(nproc)"
  fi
fi
if wanted sanitize; then
  # The names of the tools that complained make the stage fail.
  # shellcheck disable=SC2016
  stage sanitize "$budget" bash -c \
    'until [[ -f $0/sanitized ]]; do sleep 1; done; ! grep . "$0/logs/complaints.log"' "$scratch"
fi
if wanted compare && [[ -d $kit/this ]]; then
  builds=("this=$kit/this")
  for name in "${variants[@]}"; do
    builds+=("$name=$kit/this+$name")
  done
  for folder in "$kit"/*/ampfuse; do
    name=$(basename "$(dirname "$folder")")
    [[ $name != this ]] && builds+=("$name=$kit/$name")
  done
  read -ra compared <<<"${COMPARE---runs 3 --bench cross_entropy fused_adam multi_tensor -- --quick}"
  ((${#builds[@]} > 1)) && stage compare $(($(left) / 3)) \
    python3 benchmarks/compare.py "${builds[@]}" "${compared[@]}" --device "$device"
elif wanted compare; then
  summary+=("compare: left out, since there is no kit")
fi
if wanted bench; then
  for index in "${!benches[@]}"; do # the others share the time that the first one leaves
    name=bench_${benches[index]}
    share=$((index == 0 ? 2 : ${#benches[@]} - index))
    stage "$name" $(($(left) / share)) python3 "benchmarks/$name.py" \
      --device "$device" --out "$scratch/bench" "${bench_flags[@]}"
  done
fi

pack
cat "$out/summary-$began.txt"
((failures == 0))
