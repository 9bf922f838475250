#pragma once

#include <pybind11/pybind11.h>

namespace torch_lms {

/// Note [DLPack's table of functions]
/// Other libraries find a table of C functions on the class of tensors, and get addresses from them
/// without calling Python. A table of ours stands in its place while paging is on: a tensor that
/// is handed out is pinned for good, as `__dlpack__` does it; one that is lent for a call stays as
/// if its `data_ptr` had been asked for (`GivenAddresses::give_out`). What a library has found
/// before is not known.

/// Note [Functions that are found early]
/// A program that begins with `from torch.utils.dlpack import to_dlpack` has PyTorch's own function
/// before paging is on, and what is put into the module afterwards is none of its concern. So what
/// the function's object calls is exchanged: it pins the tensor first, for whoever has the object.

/// Adds `watch_exchange`, which takes PyTorch's table and returns ours, each in its capsule; and
/// `watch_exports`, which takes PyTorch's functions `_to_dlpack` and `_to_dlpack_versioned`.
void bind_exchange(pybind11::module_& module);

} // namespace torch_lms
