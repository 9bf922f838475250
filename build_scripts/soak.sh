#!/usr/bin/env bash
# Runs the tests again and again beside busy loops, for what fails once in many times: the Python tests in chaos mode and
# plain, the C++ stress tests under the thread and address sanitizers, the programs of tests/soak. One after the other.
#
#   build_scripts/soak.sh [MINUTES] [--busy N] [--only 'NAMES'] [--seed N] [--device cpu|cuda] [--seconds N]
#                         [--folder FOLDER] [--python PYTHON]
#
# MINUTES   10; what then runs is ended, and counts as cut short. Ctrl-C does the same
# --busy    how many loops keep processors busy; 4 for each core
# --only    of: two_threads server_2 server_4 server_8 raw_pointer dynamic_compile race_pageout cpp_tsan cpp_asan chaos
#           plain; for --device cuda without cpp_ and chaos
# --seed    of the first run (TORCH_LMS_CHAOS_SEED, and of the programs); each run has the next
# --seconds of each program, 25
# --folder  build/soak: the logs, cores and backtraces of runs that failed
# --python  takes this Python as it is; without it, .venv is made and the extension is built
#
# Says at the end how many runs of what passed, with the command that repeats each that failed. Exit status 1 if one did.
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

minutes=10 busy=$((4 * $(nproc))) only='' seed=1 device=cpu seconds=25 folder=$project/build/soak python=''
while (($#)); do
  case $1 in
    --help | -h) sed -n '2,/^# shellcheck/{/^# shellcheck/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}" && exit ;;
    --busy) busy=${2:?expected a number after --busy} && shift ;;
    --only) only=${2:?expected names after --only} && shift ;;
    --seed) seed=${2:?expected a number after --seed} && shift ;;
    --device) device=${2:?expected cpu or cuda after --device} && shift ;;
    --seconds) seconds=${2:?expected a number after --seconds} && shift ;;
    --folder) folder=${2:?expected a folder after --folder} && shift ;;
    --python) python=${2:?expected a Python after --python} && shift ;;
    -*) fail "expected MINUTES and options, found '$1'; see --help" ;;
    *) minutes=$1 ;;
  esac
  shift
done
for number in "$minutes" "$busy" "$seed" "$seconds"; do
  [[ $number =~ ^[0-9]+$ ]] || fail "expected whole numbers for MINUTES, --busy, --seed and --seconds, found '$number'"
done
programs='two_threads server_2 server_4 server_8 raw_pointer dynamic_compile race_pageout'
case $device in
  cpu) known="$programs cpp_tsan cpp_asan chaos plain" suite=(tests --ignore tests/unit/test_soak_programs.py) ;;
  cuda) known="$programs plain" suite=(tests/gpu) ;;
  *) fail "expected cpu or cuda after --device, found '$device'" ;;
esac
read -ra names <<<"${only:-$known}"
for name in "${names[@]}"; do
  [[ " $known " == *" $name "* ]] || fail "expected names among '$known' for $device, found '$name'; correct it"
done

if [ -z "$python" ]; then
  phase "tools" need_tools
  phase "environment" make_environment build_scripts/requirements-dev.txt
  phase "build" build_extension
  python=$venv/bin/python
fi

# describe NAME SEED LEFT_S: sets `command`, words that env(1) understands, `limit_s`, how long it may take before it counts
# as a hang, and `patience_s`, how long it may go on when LEFT_S are over. Many busy loops make a suite last several times
# as long as alone. It ends itself between two of its tests: an interrupt may hit a callback of the garbage collector,
# where Python loses it.
describe() {
  local program=$1 seed=$2 left_s=$3 threads=2
  command=("PYTHONPATH=$PYTHONPATH" PYTHONFAULTHANDLER=1) patience_s=0
  case $program in
    cpp_*)
      command=(TESTS=stress bash tests/cpp/run.sh "${program#cpp_}")
      limit_s=900
      ;;
    chaos | plain)
      [ "$program" = plain ] || command+=(TORCH_LMS_CHAOS=1 "TORCH_LMS_CHAOS_SEED=$seed")
      command+=("$python" -m pytest -q --tb=short -p no:cacheprovider -o timeout=600 -o "session_timeout=$left_s")
      [ "$program" = plain ] || command+=(-m 'not slow')
      command+=("${suite[@]}")
      limit_s=5400 patience_s=600 # of its slowest test
      ;;
    *)
      case $program in
        server_*) threads=${program#server_} program=server ;;
        race_pageout) threads=8 ;;
        two_threads) threads=$((2 + seed % 4)) ;;
      esac
      command+=("$python" -m "tests.soak.$program" --device "$device" --threads "$threads" --seconds "$seconds" --seed "$seed")
      limit_s=$((10 * seconds + 300))
      ;;
  esac
}

busy_pids=()
run_pid=''
stopped=0
start_busy_loops() {
  local i
  for ((i = 0; i < busy; i++)); do
    (trap - INT TERM && while :; do :; done) &
    busy_pids+=("$!")
  done
}

finish() {
  ((${#busy_pids[@]} == 0)) || kill "${busy_pids[@]}" 2>/dev/null || true
  [ -z "$run_pid" ] || kill -TERM "$run_pid" 2>/dev/null || true
}

# The cores that runs left since a file was touched: the kernel writes them into the folder that the process was in.
# Those that it gives to another program, or keeps in a folder for all, stay there.
cores_since() {
  [[ $core_pattern == ['|/']* ]] || find "$project" -maxdepth 1 -type f -name '*core*' -size +1M -newer "$1"
}

# keep BASE: moves the cores of a failed run beside its log; if there is gdb, the stacks are in BASE.backtrace.
keep() {
  local base=$1 core
  while read -r core; do
    mv "$core" "$base.core"
    if command -v gdb >/dev/null; then
      timeout 300 gdb --batch -ex 'thread apply all backtrace 40' "$python" "$base.core" >"$base.backtrace" 2>&1 || true
    fi
    kept_cores=$((kept_cores + 1))
    ((kept_cores <= 5)) || rm "$base.core" # they are large
  done < <(cores_since "$base.begin")
}

# outcome STATUS SIGNAL LOG: in words. A run that ended itself or was interrupted because time was up has failed if it
# says so, or if it had to be killed.
outcome() {
  local status=$1 signal=$2 log=$3 time_up=0
  if ((status == 1)) && grep -q '^!.* session-timeout: ' "$log"; then
    time_up=1
  elif [ "$signal" = INT ] && ((status == 124 || stopped && status != 137)); then
    time_up=1
  fi
  if ((status == 0)); then
    echo passed
  elif ((time_up)) && ! grep -qE "$failure_words" "$log"; then
    echo 'cut short'
  elif ((status == 124 || status == 137)); then
    echo "FAILED with status $status: did not end in time"
  else
    echo "FAILED with status $status"
  fi
}

# count NAME RESULT BASE: adds a run to the table; removes what it left unless it failed.
count() {
  local name=$1 result=$2 base=$3 core
  case $result in
    passed) passed[$name]=$((${passed[$name]:-0} + 1)) ;;
    cut*) cut[$name]=$((${cut[$name]:-0} + 1)) ;;
    *)
      failed[$name]=$((${failed[$name]:-0} + 1))
      failures+=("$base.log: $result" "  $(sed -n '1s/^[$] //p' "$base.log")")
      keep "$base"
      ;;
  esac
  if [[ $result != FAILED* ]]; then
    while read -r core; do rm -f "$core"; done < <(cores_since "$base.begin") # of tests that crash on purpose
    rm -f "$base.log"
  fi
  rm -f "$base.begin"
}

declare -A passed=() failed=() cut=()
failures=()
kept_cores=0
most_failures=100 # two lines of `failures` each; then the tests are broken, and there is enough to look at
core_pattern=$(cat /proc/sys/kernel/core_pattern 2>/dev/null || echo core)
failure_words='(^|[ =])[0-9]+ (failed|error)|^FAILED|: FAILED|WARNING: ThreadSanitizer|ERROR: AddressSanitizer'

# run NAME SEED: one run. One that hangs is aborted, so that there are stacks; at the end of all time it is interrupted,
# so that pytest still says what has failed.
run() {
  local name=$1 seed=$2 base=$folder/$1-$2 began=$SECONDS status=0 left_s=$((end - SECONDS)) signal=ABRT result
  describe "$name" "$seed" "$left_s"
  if ((left_s + patience_s < limit_s)); then
    limit_s=$((left_s + patience_s)) signal=INT
  fi
  touch "$base.begin"
  printf '$ %s\n' "$(printf '%q ' env "${command[@]}")" >"$base.log"
  # A shell in the background gives its children a SIGINT that is ignored: the run could not be cut short.
  timeout --signal="$signal" --kill-after=60 "$limit_s" env --default-signal=INT "${command[@]}" >>"$base.log" 2>&1 &
  run_pid=$!
  { wait "$run_pid" || status=$?; } 2>/dev/null # the shell's own words on a crash
  if ((stopped)); then # Ctrl-C interrupted `wait`, not the run
    signal=INT status=0
    kill -INT "$run_pid" 2>/dev/null || true
    wait "$run_pid" || status=$?
  fi
  run_pid=''
  result=$(outcome "$status" "$signal" "$base.log")
  count "$name" "$result" "$base"
  printf '%s, seed %s: %s, %s s\n' "$name" "$seed" "$result" "$((SECONDS - began))"
}

# The table; the exit status.
show_table() {
  local name
  printf '\n%-16s %8s %8s %10s\n' run passed failed 'cut short'
  for name in "${names[@]}"; do
    printf '%-16s %8d %8d %10d\n' "$name" "${passed[$name]:-0}" "${failed[$name]:-0}" "${cut[$name]:-0}"
  done
  printf '%s s on %s cores beside %s busy loops\n' "$SECONDS" "$(nproc)" "$busy"
  if ((${#failures[@]})); then
    printf '\nFailed; logs, cores and backtraces are kept in %s. To repeat, in %s:\n' "$folder" "$project"
    printf '  %s\n' "${failures[@]}"
    return 1
  fi
}

mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
ulimit -c unlimited 2>/dev/null || echo "no core dumps: the hard limit is $(ulimit -Hc)"
echo "the kernel's pattern of cores: $core_pattern"
# What is built is built before the busy loops begin.
case " ${names[*]} " in
  *' cpp_'*) phase "C++ tests" make --silent -j "$MAX_JOBS" -f tests/cpp/Makefile BUILD=build/cpp MODES='tsan asan' ;;
esac
case " ${names[*]} " in
  *' raw_pointer '*)
    phase "extension of raw_pointer" "$python" -c "from tests.soak.raw_pointer import build; build('$device')" || true
    ;;
esac
end=$((SECONDS + 60 * minutes))
trap finish EXIT
trap 'stopped=1' INT TERM
start_busy_loops
while ((!stopped && SECONDS < end && ${#failures[@]} < 2 * most_failures)); do
  for name in "${names[@]}"; do
    ((!stopped && SECONDS < end && ${#failures[@]} < 2 * most_failures)) || break
    run "$name" "$seed"
    seed=$((seed + 1))
  done
done
show_table
