#!/usr/bin/env bash
# Builds and runs the tests of the C++ core, which need neither PyTorch nor CUDA, and those of the extension,
# with the PyTorch of $PYTHON (default: .venv's, else python3's) where there is one.
#
#   tests/cpp/run.sh                  every test: plain, and under the address, undefined
#                                     behaviour and thread sanitizers
#   tests/cpp/run.sh tsan             one way (of: plain asan tsan)
#   TESTS=host_pool tests/cpp/run.sh  only the programs whose names contain host_pool
#   FILTER=fork tests/cpp/run.sh      only the tests whose names contain fork
#   EXTENSION=1 tests/cpp/run.sh      fails where there is no PyTorch; 0 leaves the extension out
#   LMS_STRESS_SECONDS=60 ...         how long the extension's stress test takes on each device
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
project=$PWD

modes=("$@")
[[ $# -gt 0 ]] || modes=(plain asan tsan)
build=${BUILD:-build/cpp}

python=${PYTHON:-.venv/bin/python}
[[ -x $python || -n ${PYTHON:-} ]] || python=python3
torch=
if [[ ${EXTENSION:-} != 0 ]]; then
  find_torch='import importlib.util as u; s = u.find_spec("torch"); print(s.submodule_search_locations[0] if s else "")'
  torch=$("$python" -c "$find_torch" 2>/dev/null || true)
  [[ -f $torch/include/ATen/record_function.h ]] || torch=
  if [[ -z $torch ]]; then
    echo "found no PyTorch in '$python': the extension is left out (set PYTHON to one that has it)"
    [[ -z ${EXTENSION:-} ]] || exit 1
  fi
fi

make --silent -j "${JOBS:-2}" -f tests/cpp/Makefile BUILD="$build" TORCH="$torch" MODES="${modes[*]}"

export UBSAN_OPTIONS=${UBSAN_OPTIONS:-print_stacktrace=1}
core_tsan_options=second_deadlock_stack=1
export LSAN_OPTIONS=${LSAN_OPTIONS:-suppressions=$project/tests/cpp/lsan_suppressions.txt:print_suppressions=0}
# The thread sanitizer of older compilers cannot live with much address randomization.
fixed_addresses=()
if setarch -R true 2>/dev/null; then
  fixed_addresses=(setarch -R)
fi

build=$(realpath "$build")
results=$build/results # a folder for each program, which runs in it: its log, its status, its stacks if it crashed
rm -rf "$results"
mkdir -p "$results"

# The stacks of a program that has just crashed, if the system leaves a core here and there is a debugger.
ulimit -c unlimited 2>/dev/null || true
print_stacks() {
  local program=$1 core
  for core in core core.*; do
    if [[ -f $core ]] && command -v gdb >/dev/null; then
      gdb --batch --nx --ex 'thread apply all backtrace 30' "$program" "$core" 2>/dev/null | tail -n 150
    fi
  done
}

# run_program MODE NAME [DEVICE]
run_program() {
  local mode=$1 name=$2 device=${3:-} status=0 runner=() options=$core_tsan_options
  local label="$mode $name${device:+ ($device)}"
  local result=$results/${label//\//-}
  [[ $mode != tsan ]] || runner=("${fixed_addresses[@]}")
  # PyTorch is not instrumented: see the file of suppressions.
  [[ -z $device ]] ||
    options+=:ignore_noninstrumented_modules=1:suppressions=$project/tests/cpp/tsan_suppressions.txt
  mkdir -p "$result"
  cd "$result"
  LMS_TEST_DEVICE=$device TSAN_OPTIONS=${TSAN_OPTIONS:-$options} \
    timeout --signal=ABRT --kill-after=10 600 "${runner[@]}" "$build/$mode/$name" ${FILTER:+"$FILTER"} 2>&1 | sed -u "s|^|$label: |" | tee log ||
    status=${PIPESTATUS[0]}
  print_stacks "$build/$mode/$name" >stacks
  echo "$status" >status
}

# Runs a program beside the others, as soon as there is room for it.
start_program() {
  while (($(jobs -rp | wc -l) >= ${JOBS:-2})); do
    wait -n || true
  done
  run_program "$@" &
}

shopt -s nullglob
for mode in "${modes[@]}"; do
  for source in tests/cpp/*"${TESTS:-}"*_test.cpp; do
    start_program "$mode" "$(basename "$source" .cpp)"
  done
  [[ -n $torch ]] || continue
  for source in tests/cpp/extension/*"${TESTS:-}"*_test.cpp; do
    for device in fake cpu; do
      start_program "$mode" "extension/$(basename "$source" .cpp)" "$device"
    done
  done
done
wait

failed=()
ran=0
for result in "$results"/*/; do
  status=$(cat "$result/status")
  case $status in
    0) ran=$((ran + 1)) ;;
    77) ;; # has no such test
    *)
      echo "the last lines of one that failed with status $status:"
      tail -n 20 "$result/log"
      cat "$result/stacks"
      failed+=("$(basename "$result")")
      ;;
  esac
done
if [[ ${#failed[@]} -gt 0 ]]; then
  printf 'FAILED: %s\n' "${failed[@]}"
  exit 1
fi
if [[ $ran -eq 0 ]]; then
  echo "expected tests with TESTS='${TESTS:-}' and FILTER='${FILTER:-}', found none"
  exit 1
fi
echo "all passed (${modes[*]})"
