#!/usr/bin/env bash
# Builds the extension on a machine with a CUDA GPU, in place, then tests and measures it.
#
#   bash build_scripts/gpu.sh [STAGE...]
#
# Stages, in the order in which they run by default:
#   build                                               in place
#   access memory graphs training optimizers
#     devices profile chunks chunk_ranks                tests/gpu/test_STAGE_cuda.py, each in a process of its own
#   doctor train                                        python -m torch_lms ...; the picture of the demo
#   transfers overhead model_state what_runs
#     inference optimizer_choice                        python -m benchmarks...
#   every_op                                            as access; minutes
# Two names stand for several: tests (access to chunk_ranks) and benchmarks (transfers to optimizer_choice).
#
# Stages about plans, by their names alone, with what they are expected to take and at most may:
#   plans            plain, ours at six limits, each way alone         400 of 540 s
#   plans_peers      plain, checkpoint, selective, save_on_cpu, TRL    120 of 240 s
#   plans_compiled   plain, torch.compile with six memory budgets      300 of 500 s
#   plan_models      six models, four ways each                        400 of 540 s
#   largest_batch    GPT, ResNet-152, 3D U-Net within 24 GiB           480 of 540 s
#   largest_tokens   GPT's longest sequence within 24 GiB              160 of 300 s
#   large_state      6.7B within 60 GiB, 12.9B within 125              280 of 500 s
#   chunked          GPT 1.3B in mixed precision, model data in chunks at most 300 s
#   chunked_large    8, 13 and 16 thousand million parameters          at most 400 s
#   chunk_ranks_rate GPT 1.3B in chunks on all GPUs, at least two      at most 200 s
#   stage_relief     GPT 1.3B as one stage that gives segments up      290 of 330 s
#   plan_picture     draws what plans, plans_peers and plans_compiled wrote
# Each of their programs writes its file after every row, and goes on with the file that is there: stages and rows can
# be run one at a time. ONLY='ours-16,plain' names rows (python -m benchmarks.plans --list). Plans and traces go into
# $OUT/plans.tar.gz.
#
# What they write goes to $OUT (benchmarks/results): JSON, the picture, STAGE.log. A stage that fails or takes too long
# leaves the others alone; without a build nothing else runs. The exit status is 1 if a stage failed.
# The python3 on PATH needs PyTorch with CUDA, pytest, rich and matplotlib; every_op expecttest; plan_models and
# plans_peers transformers, accelerate and, on PYTHONPATH, TRL; inference accelerate.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
script=build_scripts/gpu.sh

if [ "${1:-}" = --help ]; then
  sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$script"
  exit 0
fi

export OUT=${OUT:-benchmarks/results}
export PYTHONPATH=$PWD/python${PYTHONPATH:+:$PYTHONPATH}
tests=(access memory graphs training optimizers devices profile pipeline chunks chunk_ranks)
benchmarks=(transfers overhead model_state what_runs inference optimizer_choice)
# How long each may take, in seconds; the others 120.
declare -A most_s=([access]=150 [graphs]=170 [training]=170 [every_op]=300 [inference]=280 [optimizer_choice]=200 [overhead]=220
  [plans]=540 [plans_peers]=240 [plans_compiled]=500 [plan_models]=540 [largest_batch]=540 [largest_tokens]=300
  [large_state]=500 [chunked]=300 [chunked_large]=400 [chunk_ranks_rate]=200
  [stage_relief]=330)

# measure MODULE ROWS [WORD...]: a program about plans, some of its rows, and its plans in one file.
measure() {
  local status=0
  python3 -m "benchmarks.$1" --only "${ONLY:-$2}" --seconds $((most_s[$stage] - 15)) --keep --output-dir "$OUT" \
    "${@:3}" || status=$?
  [ ! -d "$OUT/plans" ] || tar --create --gzip --file "$OUT/plans.tar.gz" --directory "$OUT" plans
  return "$status"
}

# run_stage NAME: what a stage does; 2 for a name that there is not.
run_stage() {
  case $1 in
    build)
      MAX_JOBS=${MAX_JOBS:-$(nproc)} TORCH_CUDA_ARCH_LIST=${TORCH_CUDA_ARCH_LIST:-9.0} \
        python3 setup.py build_ext --inplace &&
        python3 -c 'from torch_lms.swap.limits import parse_limits; print(parse_limits({"cuda": "1GiB"}))' # an error says why not
      ;;
    access | memory | graphs | training | optimizers | devices | profile | pipeline | chunks | chunk_ranks | every_op)
      # A test that hangs tells where: its stage is stopped without a word of pytest's.
      python3 -m pytest -q -rfEsX --tb=short --maxfail=30 -p no:cacheprovider -m gpu -o faulthandler_timeout=60 \
        --junit-xml="$OUT/$1.xml" "tests/gpu/test_$1_cuda.py"
      ;;
    doctor) python3 -m torch_lms doctor --json | tee "$OUT/doctor.json" ;;
    train)
      python3 -m torch_lms train --model gpt --device cuda --layers 12 --width 1024 --batch 16 --tokens 1024 \
        --steps 4 --limit 50% --output "$OUT/timeline.svg" --json "$OUT/train.json"
      ;;
    transfers | overhead | model_state | what_runs | inference | optimizer_choice)
      python3 -m "benchmarks.$1" --output-dir "$OUT"
      ;;
    plans) measure plans 'plain,ours-*' ;;
    plans_peers) measure plans 'plain,checkpoint-*,selective-*,save_on_cpu,trl' ;;
    plans_compiled) measure plans 'plain,compiled-*' ;;
    plan_models) measure plan_models '*' --steps 6 ;;
    largest_batch) measure largest '*-batch-*' --steps 4 ;;
    largest_tokens) measure largest '*-tokens-*' --steps 4 ;;
    large_state) measure large_state '*' ;;
    chunked) measure chunked '*' ;;
    stage_relief) measure stage_relief '*' ;;
    chunked_large) PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True measure chunked_large '*' ;;
    chunk_ranks_rate)
      python3 -m torch.distributed.run --standalone --nproc-per-node gpu -m benchmarks.chunk_ranks \
        --only "${ONLY:-*}" --seconds $((most_s[$stage] - 15)) --output-dir "$OUT"
      ;;
    plan_picture) python3 -m benchmarks.plan_picture "$OUT/plans.json" --output "$OUT/plans.svg" ;;
    *)
      echo "gpu.sh: expected one of the stages that --help names, found '$1'; correct its name" >&2
      return 2
      ;;
  esac
}

# In a process of its own (see below), so that `timeout` can end it.
if [ "${1:-}" = --stage ]; then
  stage=$2
  run_stage "$stage"
  exit
fi

stages=()
for name in "${@:-all}"; do
  case $name in
    all) stages+=(build "${tests[@]}" doctor train "${benchmarks[@]}" every_op) ;;
    tests) stages+=("${tests[@]}") ;;
    benchmarks) stages+=("${benchmarks[@]}") ;;
    *) stages+=("$name") ;;
  esac
done

mkdir -p "$OUT"
summary=()
failed=0
for stage in "${stages[@]}"; do
  began=$SECONDS
  status=0
  echo "==> $stage"
  timeout --kill-after=10 "${most_s[$stage]:-120}" bash "$script" --stage "$stage" >"$OUT/$stage.log" 2>&1 ||
    status=$?
  if ((status == 0)); then
    tail -n 12 "$OUT/$stage.log" | cut -c1-240
  else
    failed=1
    tail -n 40 "$OUT/$stage.log" | cut -c1-240
  fi
  line="$stage: $((SECONDS - began)) s, status $status"
  ((status != 124 && status != 137)) || line+=" (took longer than ${most_s[$stage]:-120} s)"
  echo "<== $line"
  summary+=("$line")
  if ((status != 0)) && [ "$stage" = build ]; then
    break
  fi
done

printf '\n%s s in all; logs in %s\n' "$SECONDS" "$OUT"
printf '  %s\n' "${summary[@]}"
grep -hs '^MISSED' "$OUT"/*.log | cut -c1-240 | sed 's/^/  /'
exit "$failed"
