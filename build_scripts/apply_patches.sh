#!/usr/bin/env bash
# Applies a series of patches to a PyTorch source tree of get_source.sh: one commit with the new files, one a patch.
#
#   build_scripts/apply_patches.sh VERSION TREE [--new-files]
#
# --new-files only brings the new files of an already patched tree up to date, for work on csrc/entity and
# csrc/fork; nothing is committed.
# shellcheck source-path=SCRIPTDIR source=fork.sh
source "$(dirname "${BASH_SOURCE[0]}")/fork.sh"

version='' tree='' only_new_files=0
while (($#)); do
  case $1 in
    --help | -h) show_help ;;
    --new-files) only_new_files=1 ;;
    -*) fail "expected VERSION TREE [--new-files], found '$1'; see --help" ;;
    *) if [ -z "$version" ]; then version=$1; else tree=$1; fi ;;
  esac
  shift
done
[ -n "$tree" ] || fail "expected VERSION and TREE, found '$version'; see --help"
need_version "$version"
need git git "applies patches"
need_tree "$tree"

if ((only_new_files)); then
  git -C "$tree" rev-parse --verify --quiet "refs/tags/$new_files_tag" >/dev/null ||
    fail "expected a patched tree, found '$tree' without patches; run build_scripts/apply_patches.sh $version $tree"
  place_new_files "$tree"
  next_step "build_scripts/build_c10.sh $tree"
  exit 0
fi

[ "$(git -C "$tree" rev-parse HEAD)" = "$(git -C "$tree" rev-parse 'upstream^{commit}')" ] ||
  fail "expected '$tree' at its tag 'upstream', found other commits; keep them, then: git -C $tree checkout upstream"
[ -z "$(git -C "$tree" status --porcelain --untracked-files=no)" ] ||
  fail "expected no changes in '$tree', found some: see git -C $tree status"

while read -r before _ file; do
  [ "$(git -C "$tree" rev-parse --verify --quiet "upstream:$file")" = "$before" ] ||
    fail "expected the text of $version in $file (blob $before), found another; get the source again"
done < <(upstream_value "$version" file)

git -C "$tree" checkout --quiet -B large-model-support upstream
commit_new_files "$tree"
mapfile -t series < <(series_of "$version")
git -C "$tree" -c apply.whitespace=nowarn am --quiet --keep-non-patch --committer-date-is-author-date "${series[@]}" || {
  git -C "$tree" am --abort
  fail "expected every patch of patches/$version to apply without fuzz, found the one above that does not"
}
echo "$tree: new files and ${#series[@]} patches are in"
next_step "build_scripts/build_c10.sh $tree"
