#include <extension/bind_exchange.h>

#include <exception>

#include <ATen/dlpack.h>
#include <torch/csrc/autograd/python_variable.h>

#include <extension/Runtime.h>
#include <extension/base/Fork.h>

namespace py = pybind11;

namespace torch_lms {
namespace {

constexpr const char* kName = "dlpack_exchange_api"; // of the capsule, by DLPack's convention

DLPackExchangeAPI theirs;
DLPackExchangeAPI ours;

/// Calls `call(storage)` for an object that is a tensor whose storage may move. False with Python's
/// error set if it throws.
template <typename Call>
bool before_access(void* object, const Call& call) {
  auto* const python = static_cast<PyObject*>(object);
  if (in_forked_child() || THPVariable_Check(python) == 0) {
    return true; // nothing moves, or PyTorch's function says what is wrong
  }
  const at::Tensor& tensor = THPVariable_Unpack(python);
  if (!tensor.defined() || !tensor.has_storage() || !(tensor.is_cpu() || tensor.is_cuda())) {
    return true;
  }
  const c10::Storage storage = tensor.storage();
  try {
    const py::gil_scoped_release no_gil;
    call(storage);
    return true;
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return false;
  }
}

int hand_out(void* object, DLManagedTensorVersioned** out) {
  const auto pin = [](const c10::Storage& storage) { Runtime::get().manual.pin(storage); };
  return before_access(object, pin) ? theirs.managed_tensor_from_py_object_no_sync(object, out)
                                    : -1;
}

int lend(void* object, DLTensor* out) {
  const auto give_out = [](const c10::Storage& storage) {
    Runtime::get().addresses.give_out(*storage.unsafeGetStorageImpl());
  };
  return before_access(object, give_out) ? theirs.dltensor_from_py_object_no_sync(object, out) : -1;
}

py::capsule watch_exchange(const py::capsule& given) {
  const auto* table =
      static_cast<const DLPackExchangeAPI*>(PyCapsule_GetPointer(given.ptr(), kName));
  if (table == nullptr) {
    throw py::error_already_set();
  }
  if (table->header.version.major != DLPACK_MAJOR_VERSION) {
    throw py::value_error(
        "expected DLPack's table of version " + std::to_string(DLPACK_MAJOR_VERSION) +
        ", found version " + std::to_string(table->header.version.major) +
        "; build torch_lms against the PyTorch that runs");
  }
  if (table == &ours) {
    return given;
  }
  theirs = ours = *table;
  ours.header.prev_api = nullptr; // those are not watched
  ours.managed_tensor_from_py_object_no_sync = &hand_out;
  ours.dltensor_from_py_object_no_sync =
      theirs.dltensor_from_py_object_no_sync != nullptr ? &lend : nullptr;
  return py::capsule(&ours, kName);
}

} // namespace

void bind_exchange(py::module_& module) {
  module.def("watch_exchange", &watch_exchange);
}

} // namespace torch_lms
