#!/usr/bin/env bash
# Writes the patches from the commits of a patched source tree: patches/VERSION/ and, from it and the new files, the
# file for 'git am' that holds everything, patches/pytorch_VERSION_large_model_support.patch.
#
#   build_scripts/export_patches.sh VERSION TREE [--check]    the series and the file
#   build_scripts/export_patches.sh --one-file [--check]      only the files of all versions, after a change of
#                                                             csrc/entity or csrc/fork; needs no source
#
# --check writes nothing, and fails if what would be written differs from what is there.
# To edit a patch: apply_patches.sh, commit with --fixup, git rebase --interactive --autosquash, export_patches.sh.
# shellcheck source-path=SCRIPTDIR source=fork.sh
source "$(dirname "${BASH_SOURCE[0]}")/fork.sh"

version='' tree='' check=0 one_file=0
while (($#)); do
  case $1 in
    --help | -h) show_help ;;
    --check) check=1 ;;
    --one-file) one_file=1 ;;
    -*) fail "expected VERSION TREE [--check] or --one-file [--check], found '$1'; see --help" ;;
    *) if [ -z "$version" ]; then version=$1; else tree=$1; fi ;;
  esac
  shift
done
need git git "writes patches"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# put FILE TARGET: writes or compares.
put() {
  if ! cmp --quiet "$1" "$2"; then
    ((!check)) || fail "expected ${2#"$project/"} as export_patches.sh writes it, found another; run it again, without --check"
    cp "$1" "$2"
    echo "wrote ${2#"$project/"}"
  fi
}

# The new files as one mail, from a repository with nothing else in it.
export_new_files() {
  git init --quiet --initial-branch=main "$work/new"
  GIT_AUTHOR_DATE=$new_files_date GIT_COMMITTER_DATE=$new_files_date \
    git -C "$work/new" commit --quiet --allow-empty --message=empty
  commit_new_files "$work/new"
  format_patches "$work/new" HEAD~1..HEAD --stdout >"$work/new.patch"
}

export_one_file() {
  local name=pytorch_$1_large_model_support.patch
  mapfile -t series < <(series_of "$1")
  cat "$work/new.patch" "${series[@]}" >"$work/$name"
  put "$work/$name" "$patches/$name"
}

export_series() {
  local range="refs/tags/$new_files_tag..HEAD" file name
  mkdir "$work/series"
  format_patches "$tree" "$range" --output-directory "$work/series"
  compgen -G "$work/series/*.patch" >/dev/null || fail "expected commits behind $new_files_tag in '$tree', found none"
  for file in "$work/series"/*.patch; do
    name=$(basename "$file")
    put "$file" "$patches/$version/$name"
    echo "$name" >>"$work/series.names"
  done
  put "$work/series.names" "$patches/$version/series"
  for file in "$patches/$version"/*.patch; do
    grep -qx "$(basename "$file")" "$work/series.names" && continue
    ((!check)) || fail "expected only patches that the series lists, found ${file#"$project/"}"
    rm "$file"
    echo "removed ${file#"$project/"}"
  done
  # What a tree must hold before and after, so that a wrong tree is seen before it is built.
  {
    grep -v '^file ' "$patches/$version/UPSTREAM"
    git -C "$tree" diff --name-only "$range" | sort | while IFS= read -r name; do
      echo "file $(git -C "$tree" rev-parse "upstream:$name") $(git -C "$tree" rev-parse "HEAD:$name") $name"
    done
  } >"$work/UPSTREAM"
  put "$work/UPSTREAM" "$patches/$version/UPSTREAM"
}

if ((one_file)); then
  export_new_files
  for version in "${versions[@]}"; do
    export_one_file "$version"
  done
  next_step "build_scripts/check_patches.sh"
  exit 0
fi

[ -n "$tree" ] || fail "expected VERSION and TREE, or --one-file, found '$version'; see --help"
need_version "$version"
need_tree "$tree"
git -C "$tree" rev-parse --verify --quiet "refs/tags/$new_files_tag" >/dev/null ||
  fail "expected a tree of apply_patches.sh, found '$tree' without its commits"
export_series
export_new_files
export_one_file "$version"
next_step "build_scripts/check_patches.sh"
