#!/usr/bin/env bash
# Makes a virtual environment of Python in a folder and installs wheels into it.
#
#   build_scripts/make_environment.sh FOLDER [--wheels FOLDER] [--extra NAME] [PIP ARGUMENT...]
#
# --wheels  installs every wheel in that folder, with what it depends on
# --extra   with this extra of theirs
# All others are arguments of 'pip install': --requirement FILE, --constraint FILE, names of packages.
#
# PYTHON names the Python that the environment is made of. Where its packages come from, pip's own variables say
# (PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS). pip keeps nothing of what it gets, unless PIP_NO_CACHE_DIR is set to
# nothing.
# shellcheck source-path=SCRIPTDIR source=fork.sh
source "$(dirname "${BASH_SOURCE[0]}")/fork.sh"

folder='' wheels='' extra='' arguments=()
while (($#)); do
  case $1 in
    --help | -h) show_help ;;
    --wheels) wheels=${2:?expected a folder after --wheels} && shift ;;
    --extra) extra=[${2:?expected a name after --extra}] && shift ;;
    --requirement | --constraint) arguments+=("$1" "${2:?expected a file after $1}") && shift ;;
    -*) fail "expected FOLDER [--wheels FOLDER] [--extra NAME] [PIP ARGUMENT...], found '$1'; see --help" ;;
    *) if [ -z "$folder" ]; then folder=$1; else arguments+=("$1"); fi ;;
  esac
  shift
done
[ -n "$folder" ] || fail "expected FOLDER, found none; see --help"
if [ -n "$wheels" ]; then
  found=0
  for wheel in "$wheels"/*.whl; do
    [ ! -e "$wheel" ] || { arguments+=("$wheel$extra") && found=1; }
  done
  ((found)) || fail "expected wheels in '$wheels', found none; build one with build_extension.sh or build_wheel.sh"
fi
((${#arguments[@]})) || fail "expected something to install into '$folder', found nothing; see --help"
python=${PYTHON:-python3}
need "$python" python3 "makes the environment"
"$python" -c 'import ensurepip, venv' 2>/dev/null ||
  fail "expected the modules venv and ensurepip in $python, found none; install them, on Debian with: apt-get install python3-venv"

export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=${PIP_NO_CACHE_DIR-1} PIP_ROOT_USER_ACTION=ignore
"$python" -m venv "$folder"
"$folder/bin/python" -m pip install --quiet "${arguments[@]}"
"$folder/bin/python" -m pip list
next_step "$folder/bin/python"
