#include <extension/bind_exchange.h>

#include <array>
#include <exception>
#include <string>

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

void pin(const c10::Storage& storage) {
  Runtime::get().manual.pin(storage);
}

int hand_out(void* object, DLManagedTensorVersioned** out) {
  return before_access(object, &pin) ? theirs.managed_tensor_from_py_object_no_sync(object, out)
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

// --- functions of Python's that PyTorch has written in C ------------------------------------

/// Of `_to_dlpack` and `_to_dlpack_versioned`, what PyTorch calls.
std::array<PyCFunctionWithKeywords, 2> export_by{};

template <size_t kFunction>
PyObject* pin_and_export(PyObject* self, PyObject* args, PyObject* kwargs) {
  PyObject* tensor = nullptr;
  if (PyTuple_GET_SIZE(args) > 0) {
    tensor = PyTuple_GET_ITEM(args, 0);
  } else if (kwargs != nullptr) {
    tensor = PyDict_GetItemString(kwargs, "data");
  }
  return tensor == nullptr || before_access(tensor, &pin) ? export_by[kFunction](self, args, kwargs)
                                                          : nullptr;
}

template <size_t kFunction>
void watch_export(const py::handle& function) {
  constexpr int kFlags = METH_VARARGS | METH_KEYWORDS;
  PyMethodDef* const method = PyCFunction_Check(function.ptr()) != 0
                                  ? reinterpret_cast<PyCFunctionObject*>(function.ptr())->m_ml
                                  : nullptr;
  if (method == nullptr || method->ml_flags != kFlags) {
    throw py::value_error(
        "expected a function written in C that takes positional and named arguments, found " +
        py::repr(function).cast<std::string>() + "; use a PyTorch that torch_lms is tested with");
  }
  const auto ours_now =
      reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&pin_and_export<kFunction>));
  if (method->ml_meth != ours_now) {
    export_by[kFunction] =
        reinterpret_cast<PyCFunctionWithKeywords>(reinterpret_cast<void (*)()>(method->ml_meth));
    method->ml_meth = ours_now;
  }
}

void watch_exports(const py::handle& to_dlpack, const py::handle& to_dlpack_versioned) {
  watch_export<0>(to_dlpack);
  watch_export<1>(to_dlpack_versioned);
}

} // namespace

void bind_exchange(py::module_& module) {
  module.def("watch_exchange", &watch_exchange);
  module.def("watch_exports", &watch_exports);
}

} // namespace torch_lms
