#pragma once

#include <exception>
#include <string>

#include <c10/util/Exception.h>

namespace torch_lms {

/// What an exception says, without the C++ stack that PyTorch's own carry along: making
/// its text is slow, and no use to who reads a warning.
inline std::string text_of(const std::exception& error) {
  const auto* c10_error = dynamic_cast<const c10::Error*>(&error);
  return c10_error != nullptr ? c10_error->what_without_backtrace() : error.what();
}

} // namespace torch_lms
