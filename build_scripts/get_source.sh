#!/usr/bin/env bash
# Gets the PyTorch source that a series of patches is for, as a git repository with the tag 'upstream'.
#
#   build_scripts/get_source.sh VERSION FOLDER [--from git|package|wheel]
#
# VERSION is v1.12.0 or v1.13.1; FOLDER must not exist. Without --from the first of these that can be had is taken:
#   git      a checkout of the tag, with its submodules: everything, for a build
#   package  the distribution's source package (v1.13.1 only), without the code of third parties: builds with
#            the distribution's own libraries (build_wheel.sh)
#   wheel    what the released wheel has of the source (v1.12.0 only): headers, Python, YAML. Enough to check
#            patches and to compile new files, not to build PyTorch
# shellcheck source-path=SCRIPTDIR source=fork.sh
source "$(dirname "${BASH_SOURCE[0]}")/fork.sh"

version='' folder='' from=''
while (($#)); do
  case $1 in
    --help | -h) show_help ;;
    --from) from=${2:?expected git, package or wheel after --from} && shift ;;
    -*) fail "expected VERSION FOLDER [--from git|package|wheel], found '$1'; see --help" ;;
    *) if [ -z "$version" ]; then version=$1; else folder=$1; fi ;;
  esac
  shift
done
[ -n "$folder" ] || fail "expected VERSION and FOLDER, found '$version'; see --help"
need_version "$version"
need git git "keeps the source"
need sha256sum coreutils "compares files"
[ ! -e "$folder" ] || fail "expected a folder that does not exist yet, found '$folder'; name another, or remove it"
mkdir -p "$(dirname "$folder")"
folder=$(cd "$(dirname "$folder")" && pwd)/$(basename "$folder")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

repository=$(upstream_value "$version" repository)

can_clone() {
  GIT_TERMINAL_PROMPT=0 timeout 20 git ls-remote --exit-code --tags "$repository" "refs/tags/$version" >/dev/null 2>&1
}

choose() {
  if can_clone; then
    echo git
  elif [ "$version" = v1.13.1 ]; then
    echo package
  else
    echo wheel
  fi
}

from_git() {
  git clone --quiet --depth 1 --branch "$version" --recurse-submodules --shallow-submodules "$repository" "$folder"
  local found expected
  found=$(git -C "$folder" rev-parse HEAD)
  expected=$(upstream_value "$version" commit)
  [ "$found" = "$expected" ] || fail "expected commit $expected at $version, found $found; do not build it"
  git -C "$folder" tag --force upstream >/dev/null
}

# check_archive FILE KEY: its checksum is the one in UPSTREAM.
check_archive() {
  local expected
  expected=$(upstream_value "$version" "$2")
  echo "$expected  $1" | sha256sum --check --quiet - ||
    fail "expected the checksum $expected of $(basename "$1"), found another; download it again"
}

# commit_tree: what lies in $folder becomes a repository.
commit_tree() {
  git -C "$folder" init --quiet --initial-branch=main
  git -C "$folder" add --all --force .
  GIT_AUTHOR_DATE=$new_files_date GIT_COMMITTER_DATE=$new_files_date \
    git -C "$folder" commit --quiet --message="PyTorch $version"
  git -C "$folder" tag upstream
}

# The system's own list of packages may be without sources: a list of its own, with the same places.
apt_sources() {
  local file
  mkdir -p "$work/parts" "$work/lists/partial" "$work/package"
  for file in /etc/apt/sources.list.d/*.sources; do
    [ ! -e "$file" ] || sed 's/^Types:.*/Types: deb-src/' "$file" >"$work/parts/$(basename "$file")"
  done
  if [ -e /etc/apt/sources.list ]; then
    sed -n -E 's/^deb(-src)?[[:space:]]/deb-src /p' /etc/apt/sources.list >"$work/parts/sources.list"
  fi
}

from_package() {
  [ "$version" = v1.13.1 ] || fail "expected v1.13.1 with --from package, found $version: no distribution has its source"
  need apt-get apt "gets source packages"
  apt_sources
  local package options=(-o Dir::Etc::sourcelist=/dev/null -o "Dir::Etc::sourceparts=$work/parts"
    -o "Dir::State::lists=$work/lists" -o APT::Sandbox::User=root)
  package=$(upstream_value "$version" source-package)
  (
    cd "$work/package"
    apt-get "${options[@]}" update -qq && apt-get "${options[@]}" source -qq --tar-only --download-only "$package"
  ) || fail "expected the source package $package from the system's package sources, found none; try --from git"
  local archive
  archive=$(find "$work/package" -name '*.orig.tar.xz')
  check_archive "$archive" source-package-sha256
  mkdir "$folder"
  tar -xf "$archive" -C "$folder" --strip-components=1
  commit_tree
}

from_wheel() {
  [ "$version" = v1.12.0 ] || fail "expected v1.12.0 with --from wheel, found $version; try --from package"
  local python=${PYTHON:-python3}
  need "$python" python3 "gets wheels"
  "$python" -m pip --version >/dev/null 2>&1 ||
    fail "expected pip in $python, found none; name another with PYTHON=, or on Debian: apt-get install python3-pip"
  "$python" -m pip download --quiet --no-deps --dest "$work" "torch==${version#v}" --python-version 3.10 \
    --only-binary :all: --platform manylinux1_x86_64 ||
    fail "expected pip to get the wheel of torch ${version#v} for Python 3.10, found the error above; try --from git"
  check_archive "$(find "$work" -name '*.whl')" wheel-sha256
  mkdir "$folder"
  "$python" "$project/build_scripts/unpack_wheel.py" "$(find "$work" -name '*.whl')" "$folder"
  commit_tree
}

from=${from:-$(choose)}
echo "source of $version from: $from"
case $from in
  git | package | wheel) "from_$from" ;;
  *) fail "expected git, package or wheel after --from, found '$from'" ;;
esac
next_step "build_scripts/apply_patches.sh $version $folder"
