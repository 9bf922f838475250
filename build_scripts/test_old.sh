#!/usr/bin/env bash
# Tests what needs no compiled core (profile, partition, pipeline) on PyTorch 1.12.0, in .venv-old. Needs Python 3.10,
# the last that PyTorch 1.12 has wheels for; PYTHON_OLD names it. Arguments go to pytest; --find only says whether there
# is such a Python.
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

venv=$project/.venv-old
find_python() {
  local name beside
  beside=$(python3 -c 'import os, sys; print(os.path.dirname(sys.base_prefix))') # pyenv has a folder for each version
  for name in ${PYTHON_OLD:-python3.10 "$beside"/3.10.*/bin/python3.10}; do
    if "$name" -c 'import sys, ensurepip, venv; sys.exit(sys.version_info[:2] != (3, 10))' 2>/dev/null; then
      echo "$name"
      return
    fi
  done
}
[ -n "$(find_python)" ] ||
  fail "expected Python 3.10 with venv for PyTorch 1.12.0, found none; install it and name it with PYTHON_OLD="
[ "${1:-}" != --find ] || exit 0

trap show_phases EXIT

phase "environment" make_environment build_scripts/requirements-old.txt
# These are arithmetic on graphs, in which PyTorch has no part: they run on the other PyTorch.
arithmetic=()
for name in balance bottleneck_bound device_step relief schedule_costs; do
  arithmetic+=(--ignore "tests/partition/test_$name.py")
done
phase "pytest on PyTorch 1.12.0" env -u PYTHONPATH "$venv/bin/python" -m pytest -n "$MAX_JOBS" --dist worksteal \
  tests/profile tests/schedules tests/partition tests/stages tests/pipeline "${arithmetic[@]}" "$@"
