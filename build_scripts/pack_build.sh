#!/usr/bin/env bash
# Packs all that build_wheel.sh needs for a CUDA wheel of Debian's source into a root folder: for a machine that has more
# cores, and neither compilers nor a network. In parts, for a way that takes no large files.
#
#   build_scripts/pack_build.sh TREE FOLDER [--part-mib N]
#
# TREE is configured (build_wheel.sh TREE --device cuda --profile lean --configure-only); CUDA_HOME is from
# install_cuda.sh, PYTHON as for build_wheel.sh. FOLDER gets root/ and its archive in parts, build.tar.xz.00 and so on, of
# at most N MiB (60). There, as root:
#   sha256sum --check build.sha256 && mkdir ROOT && cat build.tar.xz.* | tar -xJ -C ROOT && ROOT/enter wheel
# builds the wheel with all cores, and goes on where it was when it is run again; `ROOT/enter kit` then makes what
# cuda_kit.sh does, in ROOT/kit. Any other words are a command in the root folder.
# Large libraries of CUDA are empty there: they can be linked to, not called.
# shellcheck source-path=SCRIPTDIR source=fork.sh
source "$(dirname "${BASH_SOURCE[0]}")/fork.sh"

tree='' folder='' part_mib=60
while (($#)); do
  case $1 in
    --help | -h) show_help ;;
    --part-mib) part_mib=${2:?expected a number after --part-mib} && shift ;;
    -*) fail "expected TREE FOLDER [--part-mib N], found '$1'; see --help" ;;
    *) if [ -z "$tree" ]; then tree=$1; else folder=$1; fi ;;
  esac
  shift
done
[ -n "$folder" ] || fail "expected TREE and FOLDER, found '$tree'; see --help"
for tool in apt-cache:apt dpkg-query:dpkg gcc:gcc nm:binutils xz:xz-utils; do
  need "${tool%:*}" "${tool#*:}" "packs"
done
need_tree "$tree"
tree=$(cd "$tree" && pwd)
[ -e "$tree/build/build.ninja" ] ||
  fail "expected a configured tree, found no $tree/build/build.ninja; run: build_scripts/build_wheel.sh $tree --device cuda --profile lean --configure-only"
python=$(command -v "${PYTHON:-python3}") cuda=${CUDA_HOME:-/usr/local/cuda}
[ -e "$cuda/nvvm/bin/nvcc.profile" ] || fail "expected CUDA_HOME from install_cuda.sh, found '$cuda'"
cuda=$(cd "$cuda" && pwd)
mkdir -p "$folder"
root=$(cd "$folder" && pwd)/root
rm -rf "$root" "$folder"/build.tar.xz.*
mkdir -p "$root"/{tmp,proc,dev,root,etc}

# copy PATH... [-- EXCLUDE...]: to the same places of the root folder.
copy() {
  local paths=() path
  while (($#)) && [ "$1" != -- ]; do
    path=${1#/}
    paths+=("$path")
    shift
  done
  ((!$#)) || shift
  tar -C / -cf - "${@/#/--exclude=}" "${paths[@]}" | tar -C "$root" -xf -
}

# The distribution's packages that build, with those that they need; without documents and what only debuggers want.
copy_packages() {
  local wanted=() names=()
  mapfile -t wanted < <(bash "$project/build_scripts/install_packages.sh" --list fork-build fork-libraries)
  wanted+=(bash coreutils dash diffutils findutils gawk grep libc-bin mawk sed tar util-linux xz-utils)
  # Some of the names are only provided, by packages of other names.
  mapfile -t names < <(comm -12 \
    <(apt-cache depends --recurse --installed --no-recommends --no-suggests --no-conflicts --no-breaks --no-replaces \
      --no-enhances "${wanted[@]}" | grep '^[a-z0-9]' | sort -u) \
    <(dpkg-query --show --showformat '${Package}\n' | sort -u))
  {
    dpkg-query --listfiles "${names[@]}" | grep '^/'
    find /usr/bin /usr/lib -type l -lname '/etc/alternatives/*'
    find /etc/alternatives
  } | while IFS= read -r path; do
    if [ -L "$path" ] || [ -f "$path" ]; then
      printf '%s/%s\n' "$(cd "$(dirname "$path")" && pwd -P)" "$(basename "$path")" # /lib is /usr/lib
    fi
  done | sort -u | grep -v -E '^/usr/share/(doc|man|locale|info|lintian|bug|zoneinfo|perl5?)/|/lib[a-z]*san[.]|/lto1$|-lto-dump|openblas.*[.]a$|/x86_64-linux-gnu/(perl|libperl)|/git-core/git-|/(ctest|cpack)$|/cmake[^/]*/Help/' |
    sed 's|^/||' | tar -C / --no-recursion -cf - -T - | tar -C "$root" -xf -
  ln -sfn usr/bin "$root/bin"
  ln -sfn usr/sbin "$root/sbin"
  ln -sfn usr/lib "$root/lib"
  ln -sfn usr/lib64 "$root/lib64"
}

# stub LIBRARY FILE: a library with the same name and functions, which do nothing.
stub() {
  local soname
  soname=$(objdump -p "$1" | awk '$1 == "SONAME" { print $2 }')
  nm -D --defined-only "$1" | awk 'NF >= 3 && $2 != "A" { sub(/@.*/, "", $3); print $3 }' | sort -u |
    awk '{ print ".globl " $1 "\n.type " $1 ", @function\n" $1 ":" } END { print ".section .note.GNU-stack,\"\",@progbits" }' |
    gcc -shared -nostdlib -x assembler - "-Wl,-soname,$soname" -o "$2"
}

copy_cuda() {
  local library
  copy "$cuda" -- "${cuda#/}/packages" '*.a' '*nsight*' '*nvvp*' '*/share/*' '*/libcu*.so.*' '*/libnvrtc*.so.*' \
    '*/libnpp*' '*/libnvjpeg*' '*/libnvblas*' '*/libcusolver*' '*/libcusparse*' '*/bin/cuda-*' '*/bin/ncu*' '*/lto1' '*/lib*san.*' \
    '*/bin/nvdisasm' '*/bin/nvlink' '*/bin/nvprof*' '*/bin/*lto-dump*' '*/11/cc1' '*/libnvperf*' '*/libnvvm.so*'
  copy "$cuda"/usr/lib/x86_64-linux-gnu/lib{cudart_static,cudadevrt,culibos}.a "$cuda"/usr/lib/gcc/x86_64-linux-gnu/11/lib{gcc,gcc_eh,stdc++fs}.a
  find "$cuda/usr/lib/x86_64-linux-gnu" -maxdepth 1 -name '*.so*' | while IFS= read -r library; do
    if [ -L "$library" ]; then
      cp -P "$library" "$root$library"
    elif [ "$(stat -c %s "$library")" -lt 2000000 ]; then
      cp -p "$library" "$root$library"
    else
      case $(basename "$library") in
        libcublas* | libcufft.* | libcurand* | libcusolver.* | libcusparse* | libnvrtc.* | libcupti*) stub "$library" "$root$library" ;;
      esac
    fi
  done
}

copy_python() {
  local base environment
  base=$("$python" -c 'import sys; print(sys.base_prefix)')
  environment=$("$python" -c 'import sys; print(sys.prefix)')
  copy "$base" -- "${python_extras[@]}" 'libpython*.a' "${base#/}/share"
  copy "$environment" -- __pycache__ '*/tests' '*/pip'
}

# Of the history no more than names: the scripts ask which version it is.
copy_tree() {
  copy "$tree" -- __pycache__ '*/test/*.py' "${tree#/}/dist" "${tree#/}/.git"
  git -C "$root$tree" init --quiet
  git -C "$tree" rev-list --objects --filter=blob:none --all | git -C "$tree" pack-objects --quiet --stdout |
    git -C "$root$tree" index-pack --stdin >/dev/null
  git -C "$root$tree" update-ref refs/tags/upstream "$(git -C "$tree" rev-parse refs/tags/upstream)"
}

write_enter() {
  cat >"$root/enter" <<SCRIPT
#!/bin/sh
root=\$(dirname "\$(readlink -f "\$0")")
if [ "\$root" != / ]; then
  for device in null:1:3 zero:1:5 random:1:8 urandom:1:9; do
    numbers=\${device#*:}
    [ -e "\$root/dev/\${device%%:*}" ] || mknod -m 666 "\$root/dev/\${device%%:*}" c "\${numbers%:*}" "\${numbers#*:}" || exit
  done
  ln -sfn /proc/self/fd "\$root/dev/fd"
  # The mount is gone with the command.
  exec unshare --mount sh -c 'mount -t proc proc "\$0/proc" && exec env -i HOME=/root PATH=/usr/sbin:/usr/bin chroot "\$0" /enter "\$@"' "\$root" "\$@"
fi
export PYTHON=$python CUDA_HOME=$cuda TORCH_CUDA_ARCH_LIST=${TORCH_CUDA_ARCH_LIST:-9.0} CCACHE_DIR=/tmp/ccache MAX_JOBS=\$(nproc)
ldconfig
case \${1:-} in
  wheel) exec bash $project/build_scripts/build_wheel.sh $tree --device cuda --profile lean ;;
  kit) exec bash $project/build_scripts/cuda_kit.sh $tree/dist/torch-*.whl /kit ;;
  *) exec "\$@" ;;
esac
SCRIPT
  chmod +x "$root/enter"
}

copy_packages
cp /etc/passwd /etc/group "$root/etc/"
copy /var/lib/dpkg/status # build_wheel.sh asks it which packages there are
copy_cuda
copy_python
copy_tree
copy "$project/build_scripts" "$project/patches" "$project/csrc" -- __pycache__
write_enter
chmod 1777 "$root/tmp"
archive "$root" "$folder/build" "$part_mib" .
next_step "sha256sum --check build.sha256 && mkdir ROOT && cat build.tar.xz.* | tar -xJ -C ROOT && ROOT/enter wheel, on a machine with many cores"
