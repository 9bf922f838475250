#!/usr/bin/env bash
# Installs Debian's packages for a purpose; the names on Ubuntu 22.04 and later are the same.
#
#   build_scripts/install_packages.sh PURPOSE...           needs root; leaves no package lists behind
#   build_scripts/install_packages.sh --list [PURPOSE...]  only names the packages, one a line; of all purposes if none is
#                                                          named
#
# PURPOSE is one or more of:
#   extension-build   what compiles torch_lms for stock PyTorch
#   extension-run     what its wheel needs besides other wheels
#   fork-build        get_source.sh, apply_patches.sh and build_wheel.sh, without a Python
#   fork-c10          what build_c10.sh needs besides
#   fork-libraries    what takes the place of third parties' code in the distribution's source package
#   fork-run          the libraries that a wheel of it loads
#   fork-cuda-build   what a CUDA image of Ubuntu 22.04 lacks for build_wheel.sh: its Python 3.10, and linear algebra
#   fork-cuda-run     the libraries that a wheel of it loads, and Python 3.10
# shellcheck source-path=SCRIPTDIR source=fork.sh
source "$(dirname "${BASH_SOURCE[0]}")/fork.sh"

purposes=(extension-build extension-run fork-build fork-c10 fork-libraries fork-run fork-cuda-build fork-cuda-run)
packages_for() {
  case $1 in
    extension-build) echo g++ python3 python3-dev python3-venv ;;
    extension-run) echo python3 ;;
    fork-build) echo ca-certificates ccache cmake g++ git ninja-build xz-utils ;;
    fork-c10) echo libfmt-dev ;;
    fork-libraries)
      echo libsleef-dev libcpuinfo-dev libpthreadpool-dev libfp16-dev libfxdiv-dev libpsimd-dev libonnx-dev \
        libprotobuf-dev protobuf-compiler libeigen3-dev pybind11-dev libflatbuffers-dev flatbuffers-compiler \
        libfmt-dev libopenblas-dev
      ;;
    fork-run) echo libcpuinfo0 libgomp1 libonnx1 libopenblas0 libprotobuf32 libsleef3 ;;
    fork-cuda-build) echo libopenblas-dev python3 python3-dev python3-venv ;;
    fork-cuda-run) echo libgomp1 libopenblas0 python3 ;;
    *) fail "expected one of the purposes ${purposes[*]}, found '$1'; see --help" ;;
  esac
}

only_list=0 wanted=()
while (($#)); do
  case $1 in
    --help | -h) show_help ;;
    --list) only_list=1 ;;
    -*) fail "expected [--list] PURPOSE..., found '$1'; see --help" ;;
    *) wanted+=("$1") ;;
  esac
  shift
done
if ((only_list && ${#wanted[@]} == 0)); then
  wanted=("${purposes[@]}")
fi
((${#wanted[@]})) || fail "expected at least one of the purposes ${purposes[*]}, found none; see --help"
names=$(for purpose in "${wanted[@]}"; do packages_for "$purpose"; done)
mapfile -t packages < <(tr ' ' '\n' <<<"$names" | sort -u)

if ((only_list)); then
  printf '%s\n' "${packages[@]}"
  exit 0
fi
need apt-get apt "installs packages"
((EUID == 0)) || fail "expected to be root, found user $EUID; become root and run: apt-get install ${packages[*]}"
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -qq -y --no-install-recommends "${packages[@]}"
rm -rf /var/lib/apt/lists/*
echo "installed for ${wanted[*]}: ${packages[*]}"
next_step "build_scripts/make_environment.sh --help"
