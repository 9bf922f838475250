#!/usr/bin/env bash
# Builds and runs the C++ core's tests, which need neither PyTorch nor CUDA.
#
#   tests/cpp/run.sh                  every test: plain, and under the address, undefined
#                                     behaviour and thread sanitizers
#   tests/cpp/run.sh tsan             one way (of: plain asan tsan)
#   TESTS=host_pool tests/cpp/run.sh  only the programs whose names contain host_pool
#   FILTER=fork tests/cpp/run.sh      only the tests whose names contain fork
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

modes=("$@")
[[ $# -gt 0 ]] || modes=(plain asan tsan)
build=${BUILD:-build/cpp}
make --silent -j "${JOBS:-2}" -f tests/cpp/Makefile BUILD="$build" MODES="${modes[*]}"

export UBSAN_OPTIONS=${UBSAN_OPTIONS:-print_stacktrace=1}
export TSAN_OPTIONS=${TSAN_OPTIONS:-second_deadlock_stack=1}
# The thread sanitizer of older compilers cannot live with much address randomization.
fixed_addresses=()
if setarch -R true 2>/dev/null; then
  fixed_addresses=(setarch -R)
fi

failed=()
ran=0
for mode in "${modes[@]}"; do
  for source in tests/cpp/*"${TESTS:-}"*_test.cpp; do
    name=$(basename "$source" .cpp)
    runner=()
    [[ $mode != tsan ]] || runner=("${fixed_addresses[@]}")
    status=0
    "${runner[@]}" "$build/$mode/$name" ${FILTER:+"$FILTER"} 2>&1 | sed -u "s/^/$mode $name: /" ||
      status=${PIPESTATUS[0]}
    case $status in
      0) ran=$((ran + 1)) ;;
      77) ;; # has no such test
      *) failed+=("$mode $name") ;;
    esac
  done
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
