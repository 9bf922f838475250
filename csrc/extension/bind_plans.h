#pragma once

#include <pybind11/pybind11.h>

namespace torch_lms {

/// Adds the functions that record cycles and take plans. Both are dictionaries of numbers, lists
/// and strings: see python/torch_lms/swap/planning.py.
void bind_plans(pybind11::module_& module);

} // namespace torch_lms
