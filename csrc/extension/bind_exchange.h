#pragma once

#include <pybind11/pybind11.h>

namespace torch_lms {

/// Note [DLPack's table of functions]
/// Other libraries find a table of C functions on the class of tensors, and get addresses from them
/// without calling Python. A table of ours stands in its place while paging is on: a tensor that
/// is handed out is pinned for good, as `__dlpack__` does it; one that is lent for a call stays as
/// if its `data_ptr` had been asked for (`GivenAddresses::give_out`). What a library has found
/// before is not known.

/// Adds `watch_exchange`, which takes PyTorch's table and returns ours, each in its capsule.
void bind_exchange(pybind11::module_& module);

} // namespace torch_lms
