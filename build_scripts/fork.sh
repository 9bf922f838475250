# shellcheck shell=bash
# What the scripts of the fork share: its versions, its new files, errors and what to run next. To be sourced.

set -euo pipefail

project=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
patches=$project/patches
versions=(v1.12.0 v1.13.1)

# Commits of these scripts are the same everywhere: no user's settings, no clock.
export GIT_CONFIG_GLOBAL=/dev/null GIT_CONFIG_NOSYSTEM=1
export GIT_AUTHOR_NAME=torch-lms GIT_AUTHOR_EMAIL=torch-lms@localhost
export GIT_COMMITTER_NAME=$GIT_AUTHOR_NAME GIT_COMMITTER_EMAIL=$GIT_AUTHOR_EMAIL
new_files_date='2026-11-21T00:00:00+0000'
new_files_tag=large-model-support-new-files

fail() {
  printf 'torch-lms: %s\n' "$*" >&2
  exit 1
}

# The comment on top of the calling script, for --help.
show_help() {
  sed -n '2,/^[^#]/{s/^# \{0,1\}//p}' "$0"
  exit 0
}

# next_step TEXT: the final line of every script.
next_step() {
  printf 'next: %s\n' "$*"
}

# need TOOL PACKAGE WHY: sees that a program is there.
need() {
  command -v "$1" >/dev/null ||
    fail "expected the program $1 ($3), found none; install it, on Debian with: apt-get install $2"
}

# need_version NAME: sees that it is one that has a series.
need_version() {
  local version
  for version in "${versions[@]}"; do
    [ "$1" != "$version" ] || return 0
  done
  fail "expected one of the versions ${versions[*]}, found '$1'; see patches/"
}

# need_tree FOLDER: sees that it is a PyTorch source tree of get_source.sh.
need_tree() {
  [ -d "$1" ] || fail "expected a PyTorch source tree, found no folder '$1'; make one with build_scripts/get_source.sh"
  git -C "$1" rev-parse --verify --quiet refs/tags/upstream >/dev/null ||
    fail "expected a PyTorch source tree with the tag 'upstream', found none in '$1'; make one with build_scripts/get_source.sh"
}

# upstream_value VERSION KEY: a line of patches/VERSION/UPSTREAM.
upstream_value() {
  awk -v key="$2" '$1 == key { sub(/^[^ ]+ +/, ""); print }' "$patches/$1/UPSTREAM"
}

# series_of VERSION: paths of its patches in order.
series_of() {
  sed -e 's/#.*//' -e '/^[[:space:]]*$/d' -e "s|^|$patches/$1/|" "$patches/$1/series"
}

# version_of TREE: the version that a tree has been made for.
version_of() {
  local version before file
  for version in "${versions[@]}"; do
    read -r before _ file < <(upstream_value "$version" file)
    if [ "$(git -C "$1" rev-parse --verify --quiet "upstream:$file")" = "$before" ]; then
      echo "$version"
      return
    fi
  done
  fail "expected the source of one of ${versions[*]} in '$1', found another"
}

# list_new_files: "SOURCE<tab>TARGET" of each file that the fork adds to PyTorch; both relative to their roots.
list_new_files() {
  (
    cd "$project"
    # Without a repository (an image, an archive) all files there count.
    { git ls-files csrc/fork 2>/dev/null || find csrc/fork -type f; } | sort | grep -v '\.md$' | while IFS= read -r file; do
      printf '%s\t%s\n' "$file" "${file#csrc/fork/}"
    done
    sed -e 's/#.*//' -e '/^[[:space:]]*$/d' patches/entity_files | while IFS= read -r name; do
      case $name in
        cuda/*) printf '%s\t%s\n' "csrc/entity/$name" "aten/src/ATen/$name" ;;
        *) printf '%s\t%s\n' "csrc/entity/$name" "c10/core/impl/$name" ;;
      esac
    done
  )
}

# as_in_pytorch SOURCE TARGET: a new file's text as PyTorch gets it. The core's includes name their places there, and its
# classes are visible to the other libraries.
as_in_pytorch() {
  local source=$1 target=$2 visible=()
  case $source in
    csrc/fork/*) cat "$project/$source" && return ;;
  esac
  case $target in
    *.h) visible=(-e 's|^namespace torch_lms {|namespace torch_lms __attribute__((visibility("default"))) {|') ;;
  esac
  echo "// Generated from $source of torch-lms: edit it there."
  sed -e 's|#include <entity/cuda/|#include <ATen/cuda/|' -e 's|#include <entity/|#include <c10/core/impl/|' \
    "${visible[@]}" "$project/$source"
}

# place_new_files TREE: writes them into a tree.
place_new_files() {
  local tree=$1 source target
  list_new_files | while IFS=$'\t' read -r source target; do
    mkdir -p "$tree/$(dirname "$target")"
    as_in_pytorch "$source" "$target" >"$tree/$target.new"
    # An unchanged file keeps its time, so that nothing is compiled again.
    if cmp --quiet "$tree/$target.new" "$tree/$target"; then
      rm "$tree/$target.new"
    else
      mv "$tree/$target.new" "$tree/$target"
    fi
  done
}

# commit_new_files TREE: adds them as one commit, and tags it.
commit_new_files() {
  local tree=$1
  place_new_files "$tree"
  list_new_files | cut -f 2 | git -C "$tree" add --force --pathspec-from-file=-
  GIT_AUTHOR_DATE=$new_files_date GIT_COMMITTER_DATE=$new_files_date \
    git -C "$tree" commit --quiet --file="$patches/new_files_message"
  git -C "$tree" tag --force "$new_files_tag" >/dev/null
}

# What only Python's own tests and tools want: for tar's --exclude.
# shellcheck disable=SC2034
python_extras=(test tests __pycache__ idlelib tkinter ensurepip lib2to3 turtledemo)

# archive FOLDER PREFIX PART_MIB PATH...: packs paths of a folder into PREFIX.tar.xz.00 and so on.
archive() {
  local folder=$1 prefix=$2 part_mib=$3
  shift 3
  tar -C "$folder" -cf - "$@" | xz -T0 -6 | split --bytes="${part_mib}M" --numeric-suffixes - "$prefix.tar.xz."
  (cd "$(dirname "$prefix")" && sha256sum "$(basename "$prefix")".tar.xz.* >"$(basename "$prefix").sha256")
  du -sh "${@/#/$folder/}"
  ls -l "$prefix".tar.xz.*
}

# format_patches TREE RANGE ARGUMENTS...: the one way in which patches are written.
format_patches() {
  local tree=$1 range=$2
  shift 2
  git -C "$tree" -c diff.renames=true -c diff.algorithm=myers -c core.abbrev=40 format-patch --quiet --no-stat --no-signature \
    --zero-commit --full-index --no-numbered --keep-subject --unified=3 "$@" "$range"
}
