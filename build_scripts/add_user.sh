#!/usr/bin/env bash
# Adds a user who has a home and may do nothing else, for the run-time stage of an image.
#
#   build_scripts/add_user.sh NAME
# shellcheck source-path=SCRIPTDIR source=fork.sh
source "$(dirname "${BASH_SOURCE[0]}")/fork.sh"

case ${1:-} in
  --help | -h) show_help ;;
  '' | -*) fail "expected NAME, found '${1:-}'; see --help" ;;
esac
need useradd passwd "adds users"
((EUID == 0)) || fail "expected to be root, found user $EUID; become root and run it again"
# Beyond the numbers that images use for users of their own.
useradd --create-home --uid 10001 --shell /usr/sbin/nologin "$1"
next_step "USER $1, in the Dockerfile"
