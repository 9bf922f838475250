#!/usr/bin/env bash
# Runs the Python tests on other versions of PyTorch than the pinned one, the extension built without CUDA: each version in
# build/pytorch-VERSION, a clone of what is committed, with an environment of its own. Most versions' wheels bring CUDA's
# libraries, some gigabytes.
#
#   build_scripts/test_versions.sh VERSION...
# shellcheck source-path=SCRIPTDIR source=common.sh disable=SC2329 # `phase` calls the functions
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
trap show_phases EXIT

(($#)) || fail "expected versions of PyTorch, found none; try: build_scripts/test_versions.sh 2.11.0 2.15.0"

make_clone() {
  [ -d "$2" ] || git clone --quiet "$project" "$2" || return
  git -C "$2" fetch --quiet origin HEAD && git -C "$2" reset --quiet --hard FETCH_HEAD &&
    # Some versions want older setuptools than the pinned one.
    sed -i "s/^torch==.*/torch==$1/; s/^setuptools==.*/setuptools>=77/" "$2/build_scripts/requirements.txt"
}

# In a shell of its own, since the clone's scripts find their files by the folder that they are in.
test_clone() {
  CUDA_HOME=/none bash -c 'source "$1/build_scripts/common.sh"
    make_environment build_scripts/requirements-dev.txt
    build_extension
    failed=0
    run_tests || failed=1
    run_chaos tests/unit tests/chunk tests/pipeline || failed=1
    exit "$failed"' _ "$1"
}

failed=0
for version in "$@"; do
  folder=$project/build/pytorch-$version
  phase "PyTorch $version: clone" make_clone "$version" "$folder" &&
    phase "PyTorch $version: tests" test_clone "$folder" || failed=1
done
exit "$failed"
