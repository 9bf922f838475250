#include <extension/bind_common.h>

#include <exception>
#include <memory>
#include <string>
#include <vector>

#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/csrc/utils/pybind.h>

#include <entity/Error.h>

#include <extension/PythonThreads.h>
#include <extension/Runtime.h>
#include <extension/base/Compat.h>

namespace py = pybind11;

namespace torch_lms {
namespace {

/// Whether its storage is no memory: its values are another tensor.
bool is_nested_wrapper(const at::Tensor& tensor) {
  return tensor.key_set().has(c10::DispatchKey::Python) && c10::str(tensor.layout()) == "Jagged";
}

c10::Storage storage_of(const py::handle& object) {
  if (THPVariable_Check(object.ptr())) {
    const at::Tensor& tensor = THPVariable_Unpack(object.ptr());
    if (!tensor.has_storage() || is_nested_wrapper(tensor)) {
      throw PageoutRefused(
          "expected a tensor with a storage, found one of layout " +
          std::string(c10::str(tensor.layout())) +
          " or a wrapper; page out the tensors it is made of (for a sparse tensor: "
          "tensor.indices() and tensor.values(), for a nested one: tensor.values() and "
          "tensor.offsets())");
    }
    return tensor.storage();
  }
  if (torch::isStorage(object.ptr())) {
    return torch::createStorage(object.ptr());
  }
  throw py::type_error(
      "expected a torch.Tensor or a torch.UntypedStorage, found " +
      std::string(py::str(py::type::of(object).attr("__name__"))) +
      "; pass tensors, or lists of them");
}

std::vector<c10::Storage> storages_of(const py::sequence& objects) {
  check_not_forked();
  std::vector<c10::Storage> storages;
  storages.reserve(objects.size());
  for (const py::handle object : objects) {
    storages.push_back(storage_of(object));
  }
  return storages;
}

int64_t pageout(const py::sequence& objects) {
  check_not_forked();
  std::vector<c10::Storage> storages;
  std::exception_ptr refused; // of the first that is none; those before it go out
  for (size_t i = 0; i < objects.size() && refused == nullptr; ++i) {
    try {
      storages.push_back(storage_of(objects[i]));
    } catch (const PageoutRefused&) {
      refused = std::current_exception();
    }
  }
  runtime().callbacks.note_other_threads(has_other_threads());
  const py::gil_scoped_release no_gil;
  const int64_t count = runtime().manual.pageout(storages);
  if (refused != nullptr) {
    std::rethrow_exception(refused);
  }
  return count;
}

int64_t prefetch(const py::sequence& objects, bool start) {
  const auto storages = storages_of(objects);
  const py::gil_scoped_release no_gil;
  return runtime().manual.prefetch(storages, start);
}

/// Whether there is a storage at all that could move. No Python code of a subclass is asked.
bool movable(const py::handle& object) {
  if (in_forked_child()) {
    return false;
  }
  c10::DeviceType where = c10::DeviceType::Meta;
  if (THPVariable_Check(object.ptr())) {
    const c10::TensorImpl* const tensor = THPVariable_Unpack(object.ptr()).unsafeGetTensorImpl();
    where = tensor->has_storage() ? tensor->unsafe_storage().device_type() : where;
  } else if (torch::isStorage(object.ptr())) {
    where = torch::createStorage(object.ptr()).device_type();
  }
  return where == c10::DeviceType::CPU || where == c10::DeviceType::CUDA;
}

void give_out(const py::sequence& objects) {
  const auto storages = storages_of(objects);
  const py::gil_scoped_release no_gil;
  for (const c10::Storage& storage : storages) {
    runtime().addresses.give_out(*storage.unsafeGetStorageImpl());
  }
}

/// Storages that stay where they are while one of these lives: raw kernels run on them.
class HeldStorages {
 public:
  explicit HeldStorages(const std::vector<c10::Storage>& storages) {
    runtime().addresses.hold(storages, held_);
  }
  ~HeldStorages() {
    if (!in_forked_child()) {
      runtime().addresses.release(held_);
    }
  }
  HeldStorages(const HeldStorages&) = delete;
  HeldStorages& operator=(const HeldStorages&) = delete;

 private:
  Pinned held_;
};

std::unique_ptr<HeldStorages> hold(const py::sequence& objects) {
  if (in_forked_child() && objects.size() == 0) { // Nothing moves there.
    return std::make_unique<HeldStorages>(std::vector<c10::Storage>());
  }
  const auto storages = storages_of(objects);
  const py::gil_scoped_release no_gil;
  return std::make_unique<HeldStorages>(storages);
}

/// All that a TorchScript module has: also what is no parameter and no buffer.
std::unique_ptr<HeldStorages> hold_script_module(const py::handle& object) {
  check_not_forked();
  const c10::IValue module = py::cast<torch::jit::Module>(object)._ivalue();
  std::vector<c10::Storage> storages;
  const py::gil_scoped_release no_gil;
  module.visit([&](const c10::IValue& value) {
    if (value.isTensor() && value.toTensor().defined() && value.toTensor().has_storage()) {
      storages.push_back(value.toTensor().storage());
    }
    return false; // on to what it contains
  });
  return std::make_unique<HeldStorages>(storages);
}

void bind_bytes(py::module_& module) {
  // Who asks for its bytes gets an error with this message, until it is given others (`set_data`).
  // Views can be made of it: they get the error, too.
  module.def("take_bytes", [](const at::Tensor& tensor, const std::string& message) {
    auto empty = c10::make_intrusive<c10::StorageImpl>(
        c10::StorageImpl::use_byte_size_t(),
        at::detail::computeStorageNbytes(
            tensor.sizes(),
            tensor.strides(),
            tensor.dtype().itemsize(),
            static_cast<size_t>(tensor.storage_offset())),
        c10::DataPtr(nullptr, tensor.device()),
        nullptr,
        /*resizable=*/false);
    empty->release_data_and_set_meta_custom_data_ptr_error_msg_(message);
    tensor.unsafeGetTensorImpl()->set_storage_keep_dtype(c10::Storage(std::move(empty)));
  });
  // Whether another tensor counts the same writes: its `detach()`, a view of it, what a graph
  // saves.
  module.def("counts_writes_with_others", [](const at::Tensor& tensor) {
    return !tensor.unsafeGetTensorImpl()->unique_version();
  });
  // Who asks for the bytes of a storage that has none gets an error with this message, until it is
  // opened. The tensor is all of it. It seems to have bytes, so that views can be made as before.
  module.def("close_storage", [](const at::Tensor& tensor, const std::string& message) {
    c10::StorageImpl& storage = *tensor.storage().unsafeGetStorageImpl();
    storage.release_data_and_set_meta_custom_data_ptr_error_msg_(message); // it releases nothing
    storage.set_nbytes(tensor.nbytes());
  });
  module.def("open_storage", [](const at::Tensor& tensor) {
    c10::StorageImpl& storage = *tensor.storage().unsafeGetStorageImpl();
    compat::allow_access(storage);
    storage.set_nbytes(0);
  });
}

} // namespace

void bind_storages(py::module_& module) {
  module.def("pageout", &pageout);
  module.def("prefetch", &prefetch, py::arg("storages"), py::arg("start") = true);
  module.def("use", &give_out);
  module.def("movable", &movable);
  py::class_<HeldStorages>(module, "HeldStorages");
  module.def("hold", &hold);
  module.def("hold_script_module", &hold_script_module);
  module.def("state", [](const py::handle& object) {
    check_not_forked();
    return runtime().manual.state(storage_of(object));
  });
  module.def("pin", [](const py::handle& object) {
    check_not_forked();
    const c10::Storage storage = storage_of(object);
    const py::gil_scoped_release no_gil;
    runtime().manual.pin(storage);
  });
  module.def("unpin", [](const py::handle& object) {
    check_not_forked();
    runtime().manual.unpin(storage_of(object));
  });
  module.def("discover", [](const py::sequence& objects) {
    const auto storages = storages_of(objects);
    const py::gil_scoped_release no_gil;
    runtime().lookup.discover(storages);
  });
  bind_bytes(module);
}

} // namespace torch_lms
