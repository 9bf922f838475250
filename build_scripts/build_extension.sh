#!/usr/bin/env bash
# Builds the wheel of torch_lms for the stock PyTorch of a Python: with CUDA where that PyTorch and CUDA_HOME have it.
#
#   build_scripts/build_extension.sh [--output FOLDER]
#
# PYTHON names that Python; it needs what build_scripts/requirements.txt says. MAX_JOBS says how many compilers run at
# once. FOLDER is dist if it is not named.
# shellcheck source-path=SCRIPTDIR source=fork.sh
source "$(dirname "${BASH_SOURCE[0]}")/fork.sh"

output=$project/dist
while (($#)); do
  case $1 in
    --help | -h) show_help ;;
    --output) output=${2:?expected a folder after --output} && shift ;;
    *) fail "expected [--output FOLDER], found '$1'; see --help" ;;
  esac
  shift
done
python=${PYTHON:-python3}
need "$python" python3 "the wheel is for it"
need "${CXX:-g++}" g++ "compiles"
"$python" -c 'import ninja, setuptools, torch' 2>/dev/null ||
  fail "expected torch, setuptools and ninja in $python, found not all; run: $python -m pip install -r build_scripts/requirements.txt"
mkdir -p "$output"
output=$(cd "$output" && pwd)
cd "$project"
export MAX_JOBS=${MAX_JOBS:-2} PIP_DISABLE_PIP_VERSION_CHECK=1
"$python" -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir "$output" .
ls -l "$output"/torch_lms-*.whl
next_step "build_scripts/make_environment.sh FOLDER --wheels $output --extra cli"
