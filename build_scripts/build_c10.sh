#!/usr/bin/env bash
# Builds libc10, libc10_cuda where there is CUDA, and the tests of the fork from a patched source tree, and runs them:
# plain, and under the address, undefined behaviour and thread sanitizers. Minutes, without the rest of PyTorch.
#
#   build_scripts/build_c10.sh TREE [--build FOLDER] [--modes 'plain address thread'] [--cuda on|off|auto] [--kit FOLDER]
#
# The tests of the CUDA device run on a fake of CUDA's runtime everywhere, and on a GPU where there is one.
# --kit copies what the tests of the CUDA device need, a few megabytes, into a folder that can be carried to a machine
# with a GPU; there: LD_LIBRARY_PATH=FOLDER FOLDER/cuda_device_test
# Uses ccache where it is there; MAX_JOBS says how many compilers run at once. FOLDER is build/c10 if it is not named.
# shellcheck source-path=SCRIPTDIR source=fork.sh
source "$(dirname "${BASH_SOURCE[0]}")/fork.sh"

tree='' build=$project/build/c10 modes='plain address thread' cuda=auto kit=''
while (($#)); do
  case $1 in
    --help | -h) show_help ;;
    --build) build=${2:?expected a folder after --build} && shift ;;
    --modes) modes=${2:?expected modes after --modes} && shift ;;
    --cuda) cuda=${2:?expected on, off or auto after --cuda} && shift ;;
    --kit) kit=${2:?expected a folder after --kit} cuda=on && shift ;;
    -*) fail "expected TREE [--build FOLDER] [--modes MODES] [--cuda on|off|auto] [--kit FOLDER], found '$1'; see --help" ;;
    *) tree=$1 ;;
  esac
  shift
done
[ -n "$tree" ] || fail "expected TREE, found none; see --help"
need cmake cmake "configures the build"
need ninja ninja-build "runs the build"
need "${CXX:-g++}" g++ "compiles"
need_tree "$tree"
tree=$(cd "$tree" && pwd)
[ -e "$tree/c10/CMakeLists.txt" ] ||
  fail "expected all of PyTorch's source in '$tree', found a part (from the wheel?); use v1.13.1, or v1.12.0 from git"
[ -e "$tree/c10/core/StoragePager.h" ] ||
  fail "expected a patched tree, found '$tree' without the fork's files; run build_scripts/apply_patches.sh"
if [ ! -d "$tree/third_party/fmt/include" ]; then
  [ -e /usr/include/fmt/format.h ] || [ -n "${fmt_DIR:-}" ] ||
    fail "expected the library fmt, found none; install it, on Debian with: apt-get install libfmt-dev"
fi

has_cuda() {
  [ -e "${CUDA_HOME:-/usr/local/cuda}/include/cuda_runtime_api.h" ]
}
case $cuda in
  on) has_cuda || fail "expected the CUDA toolkit in '${CUDA_HOME:-/usr/local/cuda}', found none; name it with CUDA_HOME=" ;;
  off) ;;
  auto) if has_cuda; then cuda=on; else cuda=off; fi ;;
  *) fail "expected on, off or auto after --cuda, found '$cuda'" ;;
esac

# with_sanitizers COMMAND...: the thread sanitizer of older compilers cannot live with much address randomization.
with_sanitizers() {
  local runner=()
  if setarch -R true 2>/dev/null; then
    runner=(setarch -R)
  fi
  UBSAN_OPTIONS=print_stacktrace=1 TSAN_OPTIONS=second_deadlock_stack=1 "${runner[@]}" "$@"
}

launcher=()
if command -v ccache >/dev/null; then
  launcher=(-DCMAKE_CXX_COMPILER_LAUNCHER=ccache)
fi
for mode in $modes; do
  case $mode in
    plain) sanitize='' ;;
    address | thread) sanitize=$mode ;;
    *) fail "expected modes among plain, address and thread, found '$mode'" ;;
  esac
  echo "== $mode"
  mkdir -p "$build/$mode"
  {
    cmake -S "$project/tests/fork" -B "$build/$mode" -G Ninja -DPYTORCH="$tree" -DSANITIZE="$sanitize" \
      -DWITH_CUDA="$cuda" -DCUDAToolkit_ROOT="${CUDA_HOME:-/usr/local/cuda}" -DCMAKE_BUILD_TYPE=RelWithDebInfo \
      "${launcher[@]}" && ninja -C "$build/$mode" -j "${MAX_JOBS:-2}"
  } >"$build/$mode/build.log" 2>&1 || {
    grep -E -A 5 'error|Error' "$build/$mode/build.log" | head -n 60 >&2
    fail "expected the $mode build to pass, found the errors above; all of the output is in $build/$mode/build.log"
  }
  (cd "$build/$mode" && with_sanitizers ctest --output-on-failure --timeout 300) ||
    fail "expected every test to pass in mode $mode, found the failures above"
done
if [ -n "$kit" ]; then
  [[ " $modes " == *" plain "* ]] || fail "expected the mode plain with --kit, found '$modes'"
  mkdir -p "$kit"
  cp "$build"/plain/{c10/libc10.so,libc10_cuda.so,libswap_cuda.so,cuda_device_test,cuda_transfer_rate,environment_test} "$kit/"
  strip --strip-unneeded "$kit"/*
  cp --dereference "${CUDA_HOME:-/usr/local/cuda}"/lib64/libcudart.so.[0-9]* "$kit/"
  next_step "LD_LIBRARY_PATH=$kit $kit/cuda_device_test, on a machine with a GPU"
  exit 0
fi
next_step "build_scripts/build_wheel.sh $tree --help"
