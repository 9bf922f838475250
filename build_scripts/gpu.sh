#!/usr/bin/env bash
# Builds the extension on a machine with a CUDA GPU, in place, then tests and measures it.
#
#   bash build_scripts/gpu.sh [STAGE...]
#
# Stages, all by default, in this order: build access doctor train transfers overhead model_state gpt gpt_fixed every_op
# What they write goes to $OUT (benchmarks/results): JSON, the picture of `train`, a log of each stage.
# The python3 on PATH needs PyTorch with CUDA, pytest, rich and matplotlib; for the peers of `gpt`, TRL on PYTHONPATH.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

if [ "${1:-}" = --help ]; then
  sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
  exit 0
fi

out=${OUT:-benchmarks/results}
export PYTHONPATH=python${PYTHONPATH:+:$PYTHONPATH}
stages=("$@")
((${#stages[@]})) || stages=(build access doctor train transfers overhead model_state gpt gpt_fixed every_op)
failed=()

build() {
  MAX_JOBS=${MAX_JOBS:-$(nproc)} TORCH_CUDA_ARCH_LIST=${TORCH_CUDA_ARCH_LIST:-9.0} python3 setup.py build_ext --inplace
}
access() { python3 -m pytest -q -x --maxfail=20 -p no:cacheprovider -m gpu tests/gpu/test_access_cuda.py; }
every_op() { python3 -m pytest -q --maxfail=20 -p no:cacheprovider -m gpu tests/gpu/test_every_op_cuda.py; }
doctor() { python3 -m torch_lms doctor; }
train() {
  python3 -m torch_lms train --model gpt --device cuda --layers 12 --width 768 --batch 16 --tokens 512 --steps 4 \
    --limit 50% --output "$out/timeline.svg" --json "$out/train.json"
}
transfers() { python3 -m benchmarks.transfers --output-dir "$out"; }
overhead() { python3 -m benchmarks.overhead --output-dir "$out"; }
model_state() { python3 -m benchmarks.model_state --output-dir "$out"; }
gpt() { python3 -m benchmarks.gpt --limits 30GiB,40GiB,16GiB --peers --output-dir "$out"; }
gpt_fixed() { python3 -m benchmarks.gpt --limits 30GiB,40GiB,16GiB --no-expandable --name gpt_fixed --output-dir "$out"; }

# How long each may take, in seconds.
declare -A most_s=([build]=120 [access]=180 [every_op]=240 [gpt]=240 [gpt_fixed]=150)

mkdir -p "$out"
for stage in "${stages[@]}"; do
  if ! declare -F "$stage" >/dev/null; then
    echo "gpu.sh: expected one of the stages that --help names, found '$stage'; correct its name" >&2
    exit 2
  fi
  began=$SECONDS
  echo "==> $stage"
  (
    export -f "${stage?}"
    export out
    timeout "${most_s[$stage]:-120}" bash -c "$stage"
  ) >"$out/$stage.log" 2>&1
  status=$?
  tail -n 12 "$out/$stage.log" | cut -c1-400
  echo "<== $stage: $((SECONDS - began)) s, status $status"
  ((status == 0)) || failed+=("$stage")
  if ((status != 0)) && [ "$stage" = build ]; then
    break
  fi
done

if ((${#failed[@]})); then
  echo "gpu.sh: failed: ${failed[*]}; their logs are in $out"
  exit 1
fi
echo "gpu.sh: all stages passed; commit $out/*.json and run python3 benchmarks/render_tables.py"
