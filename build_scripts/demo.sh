#!/usr/bin/env bash
# Trains a GPT without a limit and in half of the memory that it needs, compares every bit, shows how a plan is learned
# from step to step, and draws the memory over time and the plan.
# Arguments go to `python -m torch_lms train`.
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
trap show_phases EXIT

results=build/demo
phase "tools" need_tools
phase "environment" make_environment build_scripts/requirements.txt
phase "build" build_extension
mkdir -p "$results"
phase "train" "$venv/bin/python" -m torch_lms train --model gpt --steps 8 --limit 50% --anonymous-percent 60 \
  --output "$results/timeline.png" --json "$results/train.json" "$@"
