#!/usr/bin/env bash
# Builds a wheel of patched PyTorch. An hour or more; interrupted, it goes on where it was when it is run again.
#
#   build_scripts/build_wheel.sh TREE [--device cpu|cuda] [--profile lean|full] [--unpatched] [--configure-only]
#
# --device cuda     needs the CUDA toolkit (CUDA_HOME; install_cuda.sh makes one) and in the profile full cuDNN
#                   (CUDNN_INCLUDE_PATH, CUDNN_LIBRARY_PATH); TORCH_CUDA_ARCH_LIST is passed on, '9.0' for example;
#                   without it, the GPU that is there counts
# --profile lean    -O1, one instruction set, no Caffe2, distributed, MKLDNN, FBGEMM, NNPACK, XNNPACK, Kineto: for
#                   tests and small machines. With CUDA no cuDNN, MAGMA, NCCL, and only the kernels that training a
#                   GPT and a small CNN needs; the rest throws, and a list of it lies beside the wheel.
#                   full: PyTorch's own choice of everything
# --unpatched       of a tree without the fork, with the same options: what benchmarks/fork_steps.py compares with
# --configure-only  stops when CMake has configured the build
#
# MAX_JOBS says how many compilers run at once; PYTHON names the Python that the wheel is for (3.7 to 3.10). The
# compiler's results are kept by ccache. The wheel lies in TREE/dist.
# shellcheck source-path=SCRIPTDIR source=fork.sh
source "$(dirname "${BASH_SOURCE[0]}")/fork.sh"

tree='' device=cpu profile=full unpatched=0 configure_only=0
while (($#)); do
  case $1 in
    --help | -h) show_help ;;
    --device) device=${2:?expected cpu or cuda after --device} && shift ;;
    --profile) profile=${2:?expected lean or full after --profile} && shift ;;
    --unpatched) unpatched=1 ;;
    --configure-only) configure_only=1 ;;
    -*) fail "expected TREE [--device cpu|cuda] [--profile lean|full] [--unpatched] [--configure-only], found '$1'; see --help" ;;
    *) tree=$1 ;;
  esac
  shift
done
[ -n "$tree" ] || fail "expected TREE, found none; see --help"
case $device in cpu | cuda) ;; *) fail "expected cpu or cuda after --device, found '$device'" ;; esac
case $profile in lean | full) ;; *) fail "expected lean or full after --profile, found '$profile'" ;; esac
need cmake cmake "configures the build"
need ninja ninja-build "runs the build"
need ccache ccache "lets an interrupted build go on"
need "${CXX:-g++}" g++ "compiles"
need_tree "$tree"
tree=$(cd "$tree" && pwd)
[ -e "$tree/setup.py" ] ||
  fail "expected all of PyTorch's source in '$tree', found a part (from the wheel?); use v1.13.1, or v1.12.0 from git"
patched=0
[ ! -e "$tree/c10/core/StoragePager.h" ] || patched=1
((patched || unpatched)) ||
  fail "expected a patched tree, found '$tree' without the fork's files; run build_scripts/apply_patches.sh"
((!patched || !unpatched)) ||
  fail "expected PyTorch as it is with --unpatched, found the fork in '$tree'; get its source again, elsewhere"

python=${PYTHON:-python3}
need "$python" python3 "the wheel is for it"
"$python" -c 'import sys; sys.exit(not (3, 7) <= sys.version_info[:2] <= (3, 10))' ||
  fail "expected Python 3.7 to 3.10 ($("$python" -V) is not), as PyTorch 1.12 and 1.13 want; name one with PYTHON="
missing=$("$python" - <<'PROGRAM'
import importlib.util as util
names = {"numpy": "numpy<2", "yaml": "pyyaml", "typing_extensions": "typing_extensions", "setuptools": "setuptools<70", "wheel": "wheel"}
print(" ".join("'%s'" % package for name, package in names.items() if util.find_spec(name) is None))
PROGRAM
)
[ -z "$missing" ] || fail "expected modules for the build in $python, found none of: $missing; run: $python -m pip install $missing"
"$python" -c 'import numpy, sys; sys.exit(int(numpy.__version__.split(".")[0]) > 1)' ||
  fail "expected numpy 1 in $python, found a later one; run: $python -m pip install 'numpy<2'"

# The distribution's source is without the code of third parties: its packages take their place.
mapfile -t system_packages < <(bash "$project/build_scripts/install_packages.sh" --list fork-libraries)

is_distribution_source() {
  [ ! -e "$tree/third_party/sleef/CMakeLists.txt" ]
}

# describe WHEEL LIST: puts the list of what the build is without at the end of the wheel's description.
describe() {
  local work
  work=$(mktemp -d)
  "$python" -m wheel unpack --dest "$work" "$1"
  {
    printf '\n# What this build is without\n\n```\n'
    cat "$2"
    printf '```\n'
  } >>"$(find "$work" -path '*.dist-info/METADATA')"
  "$python" -m wheel pack --dest-dir "$(dirname "$1")" "$work"/torch-*
  rm -rf "$work"
}

prepare_distribution_source() {
  local fixes=$patches/distribution/v1.13.1 package patch absent=()
  [ "$profile" = lean ] ||
    fail "expected --profile lean with the distribution's source, found $profile: what it leaves out is not in that source; take --from git"
  need dpkg-query dpkg "looks for packages"
  for package in "${system_packages[@]}"; do
    dpkg-query --show --showformat='${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || absent+=("$package")
  done
  ((${#absent[@]} == 0)) ||
    fail "expected the distribution's libraries, found no ${absent[*]}; run: apt-get install ${absent[*]}"
  for patch in "$fixes"/*.patch; do
    git -C "$tree" apply --reverse --check "$patch" 2>/dev/null || git -C "$tree" apply "$patch" ||
      fail "expected $(basename "$patch") to apply to '$tree', found other text; get the source again"
  done
  # -u: an unchanged file keeps its time, so that nothing is compiled again.
  cp -ru --preserve=timestamps "$fixes/third_party" "$tree/"
  mkdir -p "$tree/third_party/flatbuffers/include"
  ln -sfn /usr/include/flatbuffers "$tree/third_party/flatbuffers/include/flatbuffers"
  regenerate_bytecode
}

# The generated header is for one version of FlatBuffers: this one's.
regenerate_bytecode() {
  local folder=$tree/torch/csrc/jit/serialization work
  work=$(mktemp -d)
  flatc --cpp --gen-mutable --scoped-enums -o "$work" "$folder/mobile_bytecode.fbs"
  cmp --quiet "$work/mobile_bytecode_generated.h" "$folder/mobile_bytecode_generated.h" ||
    cp "$work/mobile_bytecode_generated.h" "$folder/"
  rm -r "$work"
}

export CMAKE_GENERATOR=Ninja CMAKE_C_COMPILER_LAUNCHER=ccache CMAKE_CXX_COMPILER_LAUNCHER=ccache
export BUILD_TEST=0 USE_NUMPY=1 MAX_JOBS=${MAX_JOBS:-2}
PYTORCH_BUILD_VERSION=$(version_of "$tree")
PYTORCH_BUILD_VERSION=${PYTORCH_BUILD_VERSION#v}
((unpatched)) || PYTORCH_BUILD_VERSION+=+lms
export PYTORCH_BUILD_VERSION PYTORCH_BUILD_NUMBER=1
if [ "$profile" = lean ]; then
  # Lazy tensors' TorchScript backend stays: without it everything links, and the import fails.
  export BUILD_CAFFE2=0 BUILD_CAFFE2_OPS=0 USE_DISTRIBUTED=0 USE_MKLDNN=0 USE_FBGEMM=0 USE_NNPACK=0 USE_QNNPACK=0
  export USE_PYTORCH_QNNPACK=0 USE_XNNPACK=0 USE_KINETO=0 USE_ITT=0 USE_NUMA=0 USE_OPENMP=1 USE_MAGMA=0
  # PyTorch appends -O2 to the flags; those of the build type come later.
  export CMAKE_BUILD_TYPE=Release CMAKE_C_FLAGS_RELEASE='-O1 -DNDEBUG' CMAKE_CXX_FLAGS_RELEASE='-O1 -DNDEBUG'
  export CMAKE_PROJECT_Torch_INCLUDE=$project/build_scripts/lean.cmake
  # -O1 is for nvcc's host code; kernels are optimized as ever.
  export USE_CUDNN=0 USE_NCCL=0 USE_FLASH_ATTENTION=0 CMAKE_CUDA_FLAGS_RELEASE='-O1 -DNDEBUG'
fi
if [ "$device" = cuda ]; then
  cuda=${CUDA_HOME:-/usr/local/cuda}
  [ -x "$cuda/bin/nvcc" ] || fail "expected the CUDA toolkit (10.2 to 11.8) in '$cuda', found no bin/nvcc; name it with CUDA_HOME="
  release=$("$cuda/bin/nvcc" --version | sed -n 's/.*release \([0-9]*\)\..*/\1/p')
  ((release < 12)) || fail "expected CUDA 10.2 to 11.8 for PyTorch 1.12 and 1.13, found $release in '$cuda'; name another with CUDA_HOME="
  # CMake's modules ask for the toolkit by different names; one that lies on PATH must not come first.
  export USE_CUDA=1 CUDA_HOME=$cuda CUDA_PATH=$cuda CUDACXX=$cuda/bin/nvcc CMAKE_CUDA_COMPILER_LAUNCHER=ccache
  [ -z "${TORCH_CUDA_ARCH_LIST:-}" ] || export TORCH_CUDA_ARCH_LIST
else
  export USE_CUDA=0 USE_CUDNN=0
fi
if is_distribution_source; then
  prepare_distribution_source
  # To CMake, 0 is off: not all libraries, only those below. To setup.py, any value says that submodules may be missing.
  export USE_SYSTEM_LIBS=0
  export USE_SYSTEM_CPUINFO=1 USE_SYSTEM_SLEEF=1 USE_SYSTEM_FP16=1 USE_SYSTEM_FXDIV=1 USE_SYSTEM_PSIMD=1
  export USE_SYSTEM_PTHREADPOOL=1 USE_SYSTEM_ONNX=1 USE_SYSTEM_PYBIND11=1 USE_SYSTEM_EIGEN_INSTALL=1
  export BUILD_CUSTOM_PROTOBUF=0 BLAS=OpenBLAS
fi

cd "$tree"
if ((configure_only)); then
  "$python" setup.py build --cmake-only
  next_step "build_scripts/build_wheel.sh $tree --device $device --profile $profile$( ((!unpatched)) || echo ' --unpatched')"
  exit 0
fi
"$python" setup.py bdist_wheel
wheel=$(find dist -name 'torch-*.whl' -newer version.txt | sort | tail -n 1)
if [ "$device-$profile" = cuda-lean ]; then
  {
    cat "$project/build_scripts/lean_cuda/left_out.txt"
    printf '\n# The functions that throw for it\n'
    sort -u build/left_out_of_*.txt
  } >"$wheel.left_out.txt"
  describe "$wheel" "$wheel.left_out.txt"
fi
if ((unpatched)); then
  next_step "$python -m pip install $tree/$wheel"
  exit 0
fi
next_step "$python -m pip install $tree/$wheel && $python -m pytest --noconftest -o pythonpath= tests/fork/test_fork_api.py"
