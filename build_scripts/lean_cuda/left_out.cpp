// What stands in libtorch_cuda, and for libtorch_python, for the files that the lean profile leaves out.
#include <c10/util/Exception.h>
#include <c10/util/Type.h>

#include <cstdlib>

struct _object; // Python's

// Where link.py sends every function that is left out.
extern "C" __attribute__((visibility("default"), noreturn)) void torch_lms_left_out(
    const char* function) {
  C10_THROW_ERROR(
      NotImplementedError,
      c10::str(
          "expected a build with all of PyTorch's CUDA functions, found the lean profile, which is "
          "without ",
          c10::demangle(function),
          "; build with --profile full, or do this on the CPU"));
}

namespace torch {
namespace jit {

// No fuser, so nothing to bind.
__attribute__((visibility("default"))) void initNvFuserPythonBindings(_object*) {}

} // namespace jit
} // namespace torch

namespace {

// TorchScript would take the fuser for granted where there is CUDA.
const int no_fuser = setenv("PYTORCH_JIT_USE_NNC_NOT_NVFUSER", "1", 1);

} // namespace
