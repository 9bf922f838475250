#pragma once

#include <extension/base/Interpreter.h>

namespace torch_lms {

/// Fills in what `Interpreter` tells of Python's other threads.
void lend_threads(Interpreter& python);

/// Whether Python has other threads than the calling one. With Python's lock.
bool has_other_threads();

} // namespace torch_lms
