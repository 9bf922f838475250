#pragma once

#include <pybind11/pybind11.h>

namespace torch_lms {

/// Adds the functions that tell how it stands: counters, memory, attention.
void bind_reports(pybind11::module_& module);

} // namespace torch_lms
