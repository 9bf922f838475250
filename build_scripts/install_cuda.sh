#!/usr/bin/env bash
# Unpacks CUDA 11.8 and GCC 11, Debian 12's own packages, into a folder; the system stays as it is. 1.5 GB to download,
# and no root needed.
#
#   build_scripts/install_cuda.sh PREFIX
#
# PREFIX is then what CUDA_HOME names; its nvcc finds its GCC by itself. Interrupted, it goes on where it was.
# shellcheck source-path=SCRIPTDIR source=fork.sh
source "$(dirname "${BASH_SOURCE[0]}")/fork.sh"

prefix=''
while (($#)); do
  case $1 in
    --help | -h) show_help ;;
    -*) fail "expected PREFIX, found '$1'; see --help" ;;
    *) prefix=$1 ;;
  esac
  shift
done
[ -n "$prefix" ] || fail "expected PREFIX, found none; see --help"
need apt-get apt "gets packages"
need dpkg dpkg "unpacks them"
mkdir -p "$prefix"
prefix=$(cd "$prefix" && pwd)
work=$prefix/packages

suite=bookworm
packages=(nvidia-cuda-toolkit nvidia-cuda-dev libcudart11.0 libnvrtc11.2 libnvrtc-builtins11.8 libnvtoolsext1 libnvvm4
  libcublas11 libcublaslt11 libcufft10 libcurand10 libcusolver11 libcusparse11 libcu++-dev libcub-dev libthrust-dev
  libcupti-dev libcupti11.8 nvidia-profiler g++-11 gcc-11 cpp-11 gcc-11-base libgcc-11-dev libstdc++-11-dev)

# The system's places of packages, with the component that has CUDA: a list of its own.
apt_sources() {
  local file
  mkdir -p "$work/parts" "$work/lists/partial" "$work/archives"
  for file in /etc/apt/sources.list.d/*.sources; do
    [ ! -e "$file" ] || awk -v RS='' -v ORS='\n\n' -v suite="$suite" '$0 ~ "\nSuites:[^\n]*" suite' "$file" |
      sed -e 's/^Types:.*/Types: deb/' -e 's/^Components:.*/Components: main non-free/' >"$work/parts/$(basename "$file")"
  done
  if [ -e /etc/apt/sources.list ]; then
    sed -n -E "s/^deb[[:space:]]+((\[[^]]*\][[:space:]]+)?[^[:space:]]+[[:space:]]+${suite}[^[:space:]]*)[[:space:]].*/deb \1 main non-free/p" \
      /etc/apt/sources.list >"$work/parts/system.list"
  fi
}

apt_options=(-o Dir::Etc::sourcelist=/dev/null -o "Dir::Etc::sourceparts=$work/parts" -o "Dir::State::lists=$work/lists"
  -o "Dir::Cache=$work" -o APT::Sandbox::User=root)

download() {
  local version
  apt_sources
  apt-get "${apt_options[@]}" update -qq || fail "expected lists of packages from the system's package sources, found the error above"
  version=$(apt-cache "${apt_options[@]}" show --no-all-versions nvidia-cuda-toolkit 2>/dev/null | sed -n 's/^Version: //p')
  [[ $version == 11.8.* ]] ||
    fail "expected CUDA 11.8 in non-free of Debian 12's package sources, found '$version'; name Debian's $suite in /etc/apt"
  (cd "$work/archives" && apt-get "${apt_options[@]}" download -qq "${packages[@]}") ||
    fail "expected every package of CUDA 11.8 and GCC 11, found the error above; run this again"
}

# Twice the same file is no harm: what was interrupted is unpacked again.
unpack() {
  local archive
  for archive in "$work"/archives/*.deb; do
    [ ! -e "$archive.unpacked" ] || continue
    dpkg -x "$archive" "$prefix"
    touch "$archive.unpacked"
  done
}

# NVIDIA's own layout, but nvcc: a script puts GCC 11 first on the PATH, as nvcc asks the first one for its version.
lay_out() {
  local debian=$prefix/usr/lib/nvidia-cuda-toolkit program
  mkdir -p "$prefix/bin" "$prefix/nvvm/bin" "$prefix/gcc-11"
  ln -sfn usr/include "$prefix/include"
  ln -sfn usr/lib/x86_64-linux-gnu "$prefix/lib64"
  ln -sfn ../usr/lib/nvidia-cuda-toolkit/libdevice "$prefix/nvvm/libdevice"
  for program in "$prefix"/usr/bin/*; do
    [ "$(basename "$program")" = nvcc ] || ln -sf "../usr/bin/$(basename "$program")" "$prefix/bin/"
  done
  for program in gcc g++; do
    ln -sf "../usr/bin/x86_64-linux-gnu-$program-11" "$prefix/gcc-11/$program"
  done
  # Hard links: nvcc looks for its profile beside the place where it really is.
  ln -f "$debian/bin/nvcc" "$debian/bin/cicc" "$prefix/nvvm/bin/"
  ln -sfn ../../usr/lib/nvidia-cuda-toolkit/bin/crt "$prefix/nvvm/bin/crt"
  cat >"$prefix/nvvm/bin/nvcc.profile" <<'PROFILE'
TOP = $(_HERE_)/../..
NVVMIR_LIBRARY_DIR = $(TOP)/nvvm/libdevice
PATH += $(_HERE_):$(TOP)/bin:
INCLUDES += "-I$(TOP)/include" $(_SPACE_)
LIBRARIES =+ $(_SPACE_) "-L$(TOP)/lib64/stubs" "-L$(TOP)/lib64"
PROFILE
  cat >"$prefix/bin/nvcc.new" <<'SCRIPT'
#!/bin/sh
top=$(dirname "$(dirname "$(readlink -f "$0")")")
PATH=$top/gcc-11:$PATH exec "$top/nvvm/bin/nvcc" "$@"
SCRIPT
  chmod +x "$prefix/bin/nvcc.new"
  mv "$prefix/bin/nvcc.new" "$prefix/bin/nvcc"
}

# GCC 11's own packages point at run-time libraries that the system has: GCC 12's, which are newer.
repoint_links() {
  local link name found
  for link in "$prefix"/usr/lib/gcc/x86_64-linux-gnu/11/*.so; do
    [ ! -e "$link" ] || continue
    name=$(basename "$(readlink "$link")")
    found=/usr/lib/x86_64-linux-gnu/$name
    [ ! -e "$found" ] || ln -sf "$found" "$link"
  done
  [ -e "$prefix/usr/lib/gcc/x86_64-linux-gnu/11/libstdc++.so" ] ||
    fail "expected libstdc++.so.6 in /usr/lib/x86_64-linux-gnu, found none; install it: apt-get install libstdc++6"
}

try() {
  local program=$work/try
  printf '__global__ void f(int* x) { *x = __CUDACC_VER_MAJOR__; }\nint main() { f<<<1, 1>>>(nullptr); }\n' >"$program.cu"
  "$prefix/bin/nvcc" -arch=sm_90 -o "$program" "$program.cu" ||
    fail "expected nvcc to compile a kernel, found the error above; remove $prefix and run this again"
}

download
unpack
lay_out
repoint_links
try
next_step "CUDA_HOME=$prefix TORCH_CUDA_ARCH_LIST=9.0 build_scripts/build_wheel.sh TREE --device cuda --profile lean"
