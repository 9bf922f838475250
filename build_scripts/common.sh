# shellcheck shell=bash
# What the other scripts share: phases with their seconds, the environment in .venv, the build. To be sourced.

set -euo pipefail

project=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$project"
venv=$project/.venv
seconds_of_phases=()

export MAX_JOBS=${MAX_JOBS:-2}
export CXX=${CXX:-g++}
export PYTHONPATH=$project/python
export MPLCONFIGDIR=$venv/matplotlib
export PYTHONDONTWRITEBYTECODE= # or each of many processes compiles all of this, and rewrites all tests, once more
export PIP_DISABLE_PIP_VERSION_CHECK=1
export PIP_ROOT_USER_ACTION=ignore

# phase NAME COMMAND...: runs a command, shows its name before and its seconds after, returns its status.
phase() {
  local name=$1 start=$SECONDS status=0
  shift
  printf '\n==> %s\n' "$name"
  "$@" || status=$?
  local result="$((SECONDS - start)) s"
  ((status == 0)) || result+=", FAILED with status $status"
  printf '<== %s: %s\n' "$name" "$result"
  seconds_of_phases+=("$name: $result")
  return "$status"
}

# Shows all phases again; for the end.
show_phases() {
  printf '\nPhases, %s s in all:\n' "$SECONDS"
  printf '  %s\n' "${seconds_of_phases[@]}"
}

# alone NAME COMMAND...: runs a command, as soon as no other script in this folder runs one under that name.
alone() {
  local name=$1
  shift
  mkdir -p build
  (flock 9 && "$@") 9>"build/$name.lock"
}

fail() {
  printf 'torch-lms: %s\n' "$*" >&2
  return 1
}

# Names a Python that the pins are for; nothing if there is none.
find_python() {
  local name
  for name in ${PYTHON:-python3.11 python3.12 python3.13 python3}; do
    if "$name" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
      echo "$name"
      return
    fi
  done
}

# Names the Debian packages that are missing here, one a line.
missing_packages() {
  local python
  command -v "$CXX" >/dev/null || echo g++
  python=$(find_python)
  if [ -z "$python" ]; then
    printf '%s\n' python3 python3-venv python3-dev
    return
  fi
  "$python" -c 'import ensurepip, venv' 2>/dev/null || echo python3-venv
  "$python" -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' ||
    echo python3-dev
}

# Sees that there are a compiler and a Python with its headers; installs them where that is possible.
need_tools() {
  local missing
  mapfile -t missing < <(missing_packages)
  if ((${#missing[@]} && EUID == 0)) && command -v apt-get >/dev/null; then
    echo "installing ${missing[*]}"
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends "${missing[@]}"
    mapfile -t missing < <(missing_packages)
  fi
  ((${#missing[@]} == 0)) ||
    fail "expected a C++ compiler (g++ 11 or later) and Python 3.11 to 3.13 with venv and headers, found no" \
      "${missing[*]}; install what is missing, on Debian with: apt-get install ${missing[*]}"
}

# make_environment FILE: installs a file of pins into .venv, unless it has been installed there as it is now.
make_environment() {
  local pins=$1 python made_for stamp
  stamp=$venv/$(basename "$pins").stamp
  python=$(find_python)
  made_for="$venv for $("$python" -VV)"
  if [ "$made_for" != "$(cat "$venv/made-for" 2>/dev/null)" ]; then
    [[ ! -e $venv/pyvenv.cfg || -e $venv/made-for ]] ||
      fail "expected an environment of these scripts in $venv, or none, found another; move it away, or remove it" ||
      return
    "$python" -m venv --clear "$venv" && echo "$made_for" >"$venv/made-for" || return
  fi
  if cat build_scripts/requirements*.txt | cmp --quiet - "$stamp"; then
    echo "as it was"
    return
  fi
  "$venv/bin/python" -m pip install --quiet -r "$pins" && cat build_scripts/requirements*.txt >"$stamp"
}

# Compiles torch_lms._C in place; the compiler's words are shown only if it fails.
build_extension() {
  mkdir -p build
  if "$venv/bin/python" setup.py build_ext --inplace >build/build.log 2>&1; then
    ls -l python/torch_lms/_C.*.so
    return 0
  fi
  tail -n 60 build/build.log
  fail "expected the extension to build, found the errors above; all of the output is in build/build.log"
}

# run_tests ARGUMENT...: pytest, several tests at once, which leave the cores to one another between an op's parts.
run_tests() {
  OMP_WAIT_POLICY=passive "$venv/bin/python" -m pytest -n "$MAX_JOBS" --dist worksteal "$@"
}
run_chaos() {
  TORCH_LMS_CHAOS=1 run_tests -m "not slow" "$@"
}
