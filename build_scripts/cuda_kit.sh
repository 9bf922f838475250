#!/usr/bin/env bash
# Packs a lean CUDA wheel, with the Python and the libraries that it needs, for a machine with a GPU that has a later CUDA
# only. In parts, for a way that takes no large files.
#
#   build_scripts/cuda_kit.sh WHEEL FOLDER [--part-mib N] [--own-cublas]
#
# FOLDER gets kit/ and its archive in parts, kit.tar.xz.00 and so on, of at most N MiB (60). There:
#   sha256sum --check kit.sha256 && cat kit.tar.xz.* | tar -xJf - &&
#   CUDA_LIBRARIES=/path/of/libcublas.so.13 kit/run -c 'import torch'
# CUDA_LIBRARIES names the folders, with colons between them, of libcublas.so.13, libcublasLt.so.13 and libnvrtc.so.13,
# which calls are passed on to (forward_libraries.py). --own-cublas packs CUDA 11.8's instead: 730 MB more.
# PYTHON names the Python that the wheel is for, with the modules of requirements-fork.txt; CUDA_HOME is as for the build.
# shellcheck source-path=SCRIPTDIR source=fork.sh
source "$(dirname "${BASH_SOURCE[0]}")/fork.sh"

wheel='' folder='' part_mib=60 own_cublas=0
while (($#)); do
  case $1 in
    --help | -h) show_help ;;
    --part-mib) part_mib=${2:?expected a number after --part-mib} && shift ;;
    --own-cublas) own_cublas=1 ;;
    -*) fail "expected WHEEL FOLDER [--part-mib N] [--own-cublas], found '$1'; see --help" ;;
    *) if [ -z "$wheel" ]; then wheel=$1; else folder=$1; fi ;;
  esac
  shift
done
[ -n "$folder" ] || fail "expected WHEEL and FOLDER, found '$wheel'; see --help"
[ -e "$wheel" ] || fail "expected a wheel, found no file '$wheel'; build it with build_scripts/build_wheel.sh"
for tool in ldd:libc-bin nm:binutils strip:binutils gcc:gcc xz:xz-utils; do
  need "${tool%:*}" "${tool#*:}" "packs"
done
python=${PYTHON:-python3} cuda=${CUDA_HOME:-/usr/local/cuda}
need "$python" python3 "the wheel is for it"
"$python" -c 'import numpy, typing_extensions' ||
  fail "expected the modules of requirements-fork.txt in $python, found the error above; install them"
libraries=$cuda/lib64
[ -e "$libraries/libcudart.so.11.0" ] || fail "expected CUDA 11.8 in '$cuda', found none; name it with CUDA_HOME="
kit=$folder/kit
rm -rf "$kit" "$folder"/kit.tar.xz.*
mkdir -p "$kit/python" "$kit/lib"

# The Python without what only its own tests and tools want.
pack_python() {
  local base purelib version
  base=$("$python" -c 'import sys; print(sys.base_prefix)')
  purelib=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  version=$("$python" -c 'import sys; print("python%d.%d" % sys.version_info[:2])')
  mkdir -p "$kit/python/bin" "$kit/python/lib"
  cp -L "$base/bin/$version" "$kit/python/bin/python"
  tar -C "$base/lib" -cf - "${python_extras[@]/#/--exclude=}" --exclude='config-3*' --exclude=site-packages "$version" |
    tar -C "$kit/python/lib" -xf -
  find "$base/lib" -maxdepth 1 -name "lib$version*.so*" -exec cp -L {} "$kit/lib/" \;
  site=$kit/python/lib/$version/site-packages
  mkdir "$site"
  tar -C "$purelib" -cf - --exclude=tests --exclude=__pycache__ numpy numpy.libs typing_extensions.py | tar -C "$site" -xf -
  "$python" -c 'import sys, zipfile; zipfile.ZipFile(sys.argv[1]).extractall(sys.argv[2])' "$wheel" "$site"
  rm -rf "$site/torch/include" "$site/torch/test" "$site"/caffe2
}

# needed: the libraries that those of the wheel load, of this system and of CUDA, without the C library's.
needed() {
  find "$site/torch" "$site/numpy" -name '*.so' -exec env LD_LIBRARY_PATH="$libraries" ldd {} + | awk '$2 == "=>" && $3 ~ /^\// { print $3 }' |
    sort -u | grep -v -E "^$(readlink -f "$site")|/(ld-linux|libc|libm|libdl|libpthread|librt|libutil)[.-]"
}

pack_libraries() {
  local path name
  needed | while IFS= read -r path; do
    name=$(basename "$path")
    case $name in
      # Large, and passed on, or loaded by ops of linear algebra alone.
      libcublas* | libnvrtc* | libcuda.so* | libcusolver* | libcusparse* | libnvJitLink*) ;;
      *) cp -L "$path" "$kit/lib/$name" ;;
    esac
  done
  if ((own_cublas)); then
    cp -L "$libraries"/{libcublas.so.11,libcublasLt.so.11,libnvrtc.so.11.2,libnvrtc-builtins.so.11.8} "$kit/lib/"
  else
    "$python" "$project/build_scripts/forward_libraries.py" "$kit/lib" "$libraries/libcublas.so.11=libcublas.so.13" \
      "$libraries/libcublasLt.so.11=libcublasLt.so.13" "$libraries/libnvrtc.so.11.2=libnvrtc.so.13" \
      --for "$site"/torch/lib/libtorch_cuda.so "$site"/torch/lib/libcaffe2_nvrtc.so
  fi
}

pack_python
pack_libraries
find "$kit" -type f \( -name '*.so' -o -name '*.so.*' \) -exec strip --strip-unneeded {} \;
cat >"$kit/run" <<'SCRIPT'
#!/bin/sh
kit=$(dirname "$(readlink -f "$0")")
LD_LIBRARY_PATH=$kit/lib${CUDA_LIBRARIES:+:$CUDA_LIBRARIES} PYTHONHOME=$kit/python exec "$kit/python/bin/python" "$@"
SCRIPT
chmod +x "$kit/run"
archive "$folder" "$folder/kit" "$part_mib" kit
next_step "CUDA_LIBRARIES=... $kit/run -c 'import torch', on a machine with a GPU"
