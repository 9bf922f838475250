#include <extension/base/Interpreter.h>

namespace torch_lms {

Interpreter& interpreter() noexcept {
  static Interpreter hooks;
  return hooks;
}

} // namespace torch_lms
