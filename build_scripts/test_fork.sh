#!/usr/bin/env bash
# Checks the fork without building all of it: both series against the exact text of PyTorch, code generation, and patched
# libc10 with its tests, plain and under the sanitizers. Minutes. Sources are kept in build/source.
#
#   build_scripts/test_fork.sh [--fetch]
#
# --fetch only gets what is needed: packages (as root), sources. It fails where the network does not have them.
# shellcheck source-path=SCRIPTDIR source=common.sh disable=SC2329 # `phase` calls the functions
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

sources=$project/build/source
fetch() {
  if ((EUID == 0)) && command -v apt-get >/dev/null; then
    alone packages bash build_scripts/install_packages.sh fork-build fork-c10 || return
  fi
  alone environment make_environment build_scripts/requirements-dev.txt || return
  bash build_scripts/check_patches.sh --sources "$sources" --fetch
}

patched_c10() {
  local tree=$sources/patched-v1.13.1
  rm -rf "$tree"
  git clone --quiet --local "$sources/v1.13.1" "$tree" &&
    bash build_scripts/apply_patches.sh v1.13.1 "$tree" &&
    bash build_scripts/build_c10.sh "$tree"
}

phase "sources" fetch
[ "${1:-}" != --fetch ] || exit 0
trap show_phases EXIT
failed=0
phase "series" env PYTHON="$venv/bin/python" bash build_scripts/check_patches.sh --sources "$sources" || failed=1
phase "patched c10" patched_c10 || failed=1
exit "$failed"
