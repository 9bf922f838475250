#!/usr/bin/env bash
# Checks everything that needs no GPU: style and types, the C++ core under sanitizers, the Python tests,
# and these once more in chaos mode. Arguments go to pytest.
# shellcheck source-path=SCRIPTDIR source=common.sh disable=SC2329 # `phase` calls the functions
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
trap show_phases EXIT

phase "tools" alone packages need_tools
phase "environment" alone environment make_environment build_scripts/requirements-dev.txt
phase "build" alone extension build_extension

failed=0
phase "lint" bash build_scripts/lint.sh || failed=1
phase "C++ core" bash tests/cpp/run.sh asan tsan || failed=1
phase "pytest" run_tests "$@" || failed=1
# Only what pages: planners and partitions are arithmetic.
[[ $# -gt 0 ]] || set -- tests/unit tests/chunk tests/pipeline
phase "pytest in chaos mode" run_chaos "$@" || failed=1
exit "$failed"
