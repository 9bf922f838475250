#!/usr/bin/env bash
# Checks both series against the exact text of PyTorch: they apply without fuzz, are exported again byte by byte, leave
# the trees that UPSTREAM names, code generation runs on the patched YAML, and the new files compile against the headers.
#
#   build_scripts/check_patches.sh [--sources FOLDER] [--quick | --fetch] [VERSION...]
#
# Sources are kept in FOLDER (build/source if it is not named) and fetched into it where they are missing: the released
# wheel for v1.12.0, the distribution's source for v1.13.1. --quick leaves code generation and compiling out; --fetch
# only fetches.
# PYTHON names a Python with PyYAML and typing_extensions.
# shellcheck source-path=SCRIPTDIR source=fork.sh
source "$(dirname "${BASH_SOURCE[0]}")/fork.sh"

sources=$project/build/source quick=0 fetch_only=0 wanted=()
while (($#)); do
  case $1 in
    --help | -h) show_help ;;
    --sources) sources=${2:?expected a folder after --sources} && shift ;;
    --quick) quick=1 ;;
    --fetch) fetch_only=1 ;;
    -*) fail "expected [--sources FOLDER] [--quick | --fetch] [VERSION...], found '$1'; see --help" ;;
    *) need_version "$1" && wanted+=("$1") ;;
  esac
  shift
done
((${#wanted[@]})) || wanted=("${versions[@]}")
need git git "applies patches"
python=${PYTHON:-python3}
if ((!quick && !fetch_only)); then
  need "$python" python3 "generates code"
  need "${CXX:-g++}" g++ "compiles"
  "$python" -c 'import typing_extensions, yaml' 2>/dev/null ||
    fail "expected PyYAML and typing_extensions in $python, found no such modules; install them with pip, name another Python with PYTHON=, or take --quick"
fi
mkdir -p "$sources"
sources=$(cd "$sources" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

check_lists() {
  local version=$1 listed found
  listed=$(series_of "$version" | sort)
  [ "$(uniq <<<"$listed")" = "$listed" ] || fail "expected each patch once in patches/$version/series, found one twice"
  found=$(find "$patches/$version" -name '*.patch' | sort)
  [ "$listed" = "$found" ] ||
    fail "expected patches/$version/series to list every patch there and no other, found differences:" \
      "$(diff <(echo "$listed") <(echo "$found") | grep '^[<>]' | tr '\n' ' ')"
}

# fetch VERSION: the source, unless it is there.
fetch() {
  local version=$1
  [ -e "$sources/$version" ] ||
    bash "$project/build_scripts/get_source.sh" "$version" "$sources/$version" \
      --from "$([ "$version" = v1.12.0 ] && echo wheel || echo package)"
}

# fresh_tree VERSION: a clone at upstream in $work/VERSION, so that the source stays as it is.
fresh_tree() {
  local version=$1
  fetch "$version"
  need_tree "$sources/$version"
  git clone --quiet --local --no-checkout "$sources/$version" "$work/$version"
  git -C "$work/$version" checkout --quiet --detach upstream
}

check_series() {
  local version=$1 tree=$work/$1 _ after file
  bash "$project/build_scripts/apply_patches.sh" "$version" "$tree" >/dev/null
  bash "$project/build_scripts/export_patches.sh" "$version" "$tree" --check >/dev/null
  while read -r _ after file; do
    [ "$(git -C "$tree" rev-parse "HEAD:$file")" = "$after" ] ||
      fail "expected blob $after in $file after the series, found another; see patches/$version/UPSTREAM"
  done < <(upstream_value "$version" file)
}

# The one file, as the manual says to apply it, gives the same tree.
check_one_file() {
  local version=$1 tree=$work/$1 expected
  expected=$(git -C "$tree" rev-parse 'HEAD^{tree}')
  git -C "$tree" checkout --quiet --detach upstream
  git -C "$tree" -c apply.whitespace=nowarn am --quiet "$patches/pytorch_${version}_large_model_support.patch"
  [ "$(git -C "$tree" rev-parse 'HEAD^{tree}')" = "$expected" ] ||
    fail "expected the same tree from the series and from the one file of $version, found two"
}

# Python files of the patches and of the new files: their syntax.
check_python() {
  local tree=$work/$1 file
  { upstream_value "$1" file | cut -d ' ' -f 3; list_new_files | cut -f 2; } | grep '\.py$' | while IFS= read -r file; do
    "$python" - "$tree/$file" <<'PROGRAM' || fail "expected $file to compile after the series, found the error above"
import ast, sys
ast.parse(open(sys.argv[1], encoding="utf-8").read(), sys.argv[1], feature_version=(3, 7))
PROGRAM
  done
}

generate_code() {
  local version=$1 tree=$work/$1 generated=$work/$1-generated name
  mkdir -p "$generated/ATen"
  (cd "$tree" && PYTHONPATH=$tree "$python" -m torchgen.gen --source-path aten/src/ATen \
    --install_dir "$generated/ATen" >"$work/codegen.log" 2>&1) || {
    tail -n 20 "$work/codegen.log" >&2
    fail "expected code generation to run on the patched YAML of $version, found the error above"
  }
  for name in pageout_manual need_prefetch; do
    grep -q "void $name() const" "$generated/ATen/core/TensorBody.h" ||
      fail "expected Tensor::$name in the generated TensorBody.h of $version, found none"
    grep -q "m.impl(\"$name\"" "$generated/ATen/RegisterCompositeExplicitAutograd.cpp" ||
      fail "expected a kernel of $name for tensors of all kinds in the generated code of $version, found none"
  done
  if [ -e "$tree/tools/autograd/gen_autograd.py" ]; then
    generate_autograd "$version"
  fi
}

generate_autograd() {
  local tree=$work/$1 generated=$work/$1-generated
  (cd "$tree" && PYTHONPATH=$tree "$python" -m tools.autograd.gen_autograd aten/src/ATen/native/native_functions.yaml \
    aten/src/ATen/native/tags.yaml "$generated" tools/autograd >"$work/codegen.log" 2>&1) || {
    tail -n 20 "$work/codegen.log" >&2
    fail "expected autograd's code generation to run on the patched YAML of $1, found the error above"
  }
  grep -q 'm.impl("pageout_manual"' "$generated"/VariableType_*.cpp ||
    fail "expected pageout_manual in the generated VariableType of $1, found none"
}

# What CMake writes in a build; the defaults.
write_configured_headers() {
  local generated=$1
  mkdir -p "$generated/c10/macros" "$generated/c10/cuda/impl"
  printf '#pragma once\n#define C10_BUILD_SHARED_LIBS\n' >"$generated/c10/macros/cmake_macros.h"
  printf '#pragma once\n#define C10_CUDA_BUILD_SHARED_LIBS\n' >"$generated/c10/cuda/impl/cuda_cmake_macros.h"
}

compile_new_files() {
  local version=$1 tree=$work/$1 generated=$work/$1-generated cuda=${CUDA_HOME:-/usr/local/cuda} file count=0 skipped=0
  write_configured_headers "$generated"
  while IFS= read -r file; do
    if [[ $file == */cuda/*.cpp && ! -e $cuda/include/cuda_runtime_api.h ]]; then
      skipped=$((skipped + 1))
      continue
    fi
    "${CXX:-g++}" -std=c++14 -fsyntax-only -Wall -Wno-unknown-pragmas -DNDEBUG -I"$generated" -I"$tree" -I"$tree/aten/src" \
      -I"$tree/torch/csrc/api/include" -isystem "$cuda/include" "$tree/$file" >"$work/compile.log" 2>&1 || {
      head -n 40 "$work/compile.log" >&2
      fail "expected $file to compile against the headers of $version, found the errors above"
    }
    count=$((count + 1))
  done < <(list_new_files | cut -f 2 | grep '\.cpp$')
  echo "$version: $count new files compile against its headers$( ((skipped == 0)) || echo ", $skipped need CUDA's and were left out")"
}

if ((fetch_only)); then
  for version in "${wanted[@]}"; do
    fetch "$version"
  done
  next_step "build_scripts/check_patches.sh --sources $sources ${wanted[*]}"
  exit 0
fi
for version in "${wanted[@]}"; do
  check_lists "$version"
  fresh_tree "$version"
  check_series "$version"
  check_one_file "$version"
  echo "$version: the series and the one file apply without fuzz, and are exported byte by byte"
  if ((!quick)); then
    check_python "$version"
    generate_code "$version"
    echo "$version: code generation runs"
    compile_new_files "$version"
  fi
done
echo "patches: ${#wanted[@]} series passed"
next_step "build_scripts/build_c10.sh $sources/v1.13.1 (after apply_patches.sh)"
