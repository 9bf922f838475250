#!/usr/bin/env bash
# Runs PyTorch's own test_torch.py, test_autograd.py and test_nn.py against an installed wheel of the fork: first plain,
# then with every storage paged out at random between ops (tests/fork/random_pageouts.py). No test may fail in the second
# way alone. An hour or two; interrupted, it goes on where it was when it is run again.
#
#   build_scripts/upstream_tests.sh TREE [--files 'test_torch test_autograd test_nn'] [--work FOLDER] [--limit SECONDS]
#                                   [--test-limit SECONDS] [--processes N] [--jobs N] [--seed N] [--device cpu|cuda]
#                                   [--output-dir FOLDER] [--check-only]
#
# TREE is the source of the same version: build_scripts/get_source.sh makes it. PYTHON names the Python, 3.10, that the
# wheel is installed in. --limit is for each file in each mode, --test-limit for one test: one that takes longer counts
# as failed. --processes share each file's tests in each mode; --jobs says how many of all these run at once. --device cuda
# runs the tests of that device alone. --work (build/upstream_tests) keeps what has been run: remove it to begin anew.
# --check-only stops when it is clear that all is there. Counts go to OUTPUT-DIR/fork_upstream_tests.json (benchmarks/results).
# shellcheck source-path=SCRIPTDIR source=fork.sh
source "$(dirname "${BASH_SOURCE[0]}")/fork.sh"

tree='' check_only=0 options=()
while (($#)); do
  case $1 in
    --help | -h) show_help ;;
    --files)
      read -ra names <<<"${2:?expected names after --files}"
      options+=(--files "${names[@]}") && shift
      ;;
    --work | --limit | --test-limit | --processes | --jobs | --seed | --device | --output-dir)
      options+=("$1" "${2:?expected a value after $1}") && shift
      ;;
    --check-only) check_only=1 ;;
    -*) fail "expected TREE and options, found '$1'; see --help" ;;
    *) tree=$1 ;;
  esac
  shift
done
[ -n "$tree" ] || fail "expected TREE, found none; see --help"
[ -e "$tree/test/test_torch.py" ] ||
  fail "expected PyTorch's tests in '$tree', found no test/test_torch.py; get the source with build_scripts/get_source.sh"

python=${PYTHON:-python3}
need "$python" python3 "the wheel is installed in it"
"$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 10))' ||
  fail "expected Python 3.10 for the comparison, found $("$python" -V); name the one of the wheel with PYTHON="
found=$(cd / && "$python" - <<'PROGRAM'
import importlib.util as util
try:
    import torch
except ImportError as error:
    print("none that can be imported (%s)" % error)
else:
    if util.find_spec("torch.cuda.swap") is None:
        print("%s without the fork's patches" % torch.__version__)
    elif not hasattr(torch.cuda.swap, "stats"):
        print("%s with earlier patches" % torch.__version__)
PROGRAM
)
[ -z "$found" ] ||
  fail "expected a PyTorch with the fork's patches in $python, found $found; build it with build_scripts/build_wheel.sh and install it"
"$python" - "$tree" <<'PROGRAM' || fail "expected the source of the version that is installed, found another in '$tree'"
import pathlib, sys, torch
source = pathlib.Path(sys.argv[1], "version.txt").read_text()  # of a release it says 1.13.0a0 all the same
sys.exit(torch.__version__.split(".")[:2] != source.split(".")[:2])
PROGRAM
missing=$(
  "$python" - <<'PROGRAM'
import importlib.util as util
names = {"pytest": "'pytest<9'", "expecttest": "expecttest", "hypothesis": "hypothesis", "numpy": "'numpy<1.24'", "ninja": "ninja", "yaml": "pyyaml"}
print(" ".join(package for name, package in names.items() if util.find_spec(name) is None))
PROGRAM
)
[ -z "$missing" ] || fail "expected modules for the tests in $python, found no $missing; run: $python -m pip install $missing"
need "${CXX:-g++}" g++ "compiles tests/fork/random_pageouts.cpp"
if ((check_only)); then
  next_step "build_scripts/upstream_tests.sh $tree"
  exit 0
fi

cd "$project"
PATH=$(dirname "$(command -v "$python")"):$PATH # ninja's program
status=0
PYTHONPATH=$project "$python" -m tests.fork.upstream_tests --tree "$tree" "${options[@]}" || status=$?
if ((status)); then
  next_step "build_scripts/upstream_tests.sh $tree, to go on; or look at the logs in the folder of --work"
  exit "$status"
fi
next_step "git diff benchmarks/results/fork_upstream_tests.json"
