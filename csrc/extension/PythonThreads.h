#pragma once

#include <extension/base/Interpreter.h>

namespace torch_lms {

/// Fills in what `Interpreter` tells of Python's other threads.
void lend_threads(Interpreter& python) noexcept;

} // namespace torch_lms
