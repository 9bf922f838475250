#!/usr/bin/env bash
# Style and types of every file; --fix mends what can be mended. Uses the tools of .venv, or else those on PATH.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PATH=$PWD/.venv/bin:$PATH

fix=0
[ "${1:-}" != --fix ] || fix=1
failed=()

# check NAME COMMAND...
check() {
  local name=$1
  shift
  echo "$name"
  "$@" || failed+=("$name")
}

# Tracked files, and those that will be, that match and are there.
list() {
  git ls-files --cached --others --exclude-standard -z -- "$@" | while IFS= read -r -d '' file; do
    [ ! -e "$file" ] || printf '%s\n' "$file"
  done
}

# Names the files that clang-format would change.
unformatted() {
  local file status=0
  for file; do
    clang-format "$file" | cmp --quiet - "$file" || { echo "$file is not formatted" && status=1; }
  done
  return "$status"
}

mapfile -t cpp_files < <(list 'csrc/*.h' 'csrc/*.cpp' 'tests/*.h' 'tests/*.cpp')
mapfile -t shell_files < <(list '*.sh' '.ci/run')
mapfile -t dockerfiles < <(list 'docker/*.Dockerfile')

if ((fix)); then
  check "ruff check" ruff check --quiet --fix .
  check "ruff format" ruff format --quiet .
  check "clang-format" clang-format -i "${cpp_files[@]}"
  check "tables in README" python benchmarks/render_tables.py
else
  check "ruff check" ruff check --quiet .
  check "ruff format" ruff format --quiet --check --diff .
  check "clang-format" unformatted "${cpp_files[@]}"
  check "tables in README" python benchmarks/render_tables.py --check
fi
check "mypy" mypy
check "shellcheck" shellcheck --external-sources "${shell_files[@]}"
check "hadolint" hadolint "${dockerfiles[@]}"

if ((${#failed[@]})); then
  echo "lint: missed by ${failed[*]}; try bash build_scripts/lint.sh --fix"
  exit 1
fi
