#pragma once

#include <pybind11/pybind11.h>

namespace torch_lms {

/// Adds the functions that are called with tensors and storages.
void bind_storages(pybind11::module_& module);

} // namespace torch_lms
