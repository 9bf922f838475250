#!/usr/bin/env bash
# Builds the wheel, installs it into an environment that has nothing but what it depends on, and uses it there.
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
trap show_phases EXIT
unset PYTHONPATH # or the source would stand for what is installed

folder=$project/build/wheel
rm -rf "$folder"

use_it() {
  cd "$folder" && environment/bin/python "$project/tests/wheel/bare.py"
}

phase "environment" alone environment make_environment build_scripts/requirements-dev.txt
phase "wheel" alone extension env PYTHON="$venv/bin/python" bash build_scripts/build_extension.sh --output "$folder/dist"
# pip has most of it from .venv. PIP_NO_COMPILE=0 is pip's way to say yes: little of all that is imported here.
phase "bare environment" env PIP_NO_CACHE_DIR= PIP_NO_COMPILE=0 PYTHON="$venv/bin/python" bash build_scripts/make_environment.sh "$folder/environment" \
  --wheels "$folder/dist" --constraint build_scripts/requirements.txt
phase "use" use_it
