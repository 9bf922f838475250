#include <atomic>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/csrc/utils/pybind.h>

#include <entity/Error.h>

#include <extension/OwnPython.h>
#include <extension/Runtime.h>
#include <extension/base/Compat.h>
#include <extension/base/Fork.h>
#include <extension/base/Interpreter.h>
#include <extension/bind_exchange.h>
#include <extension/bind_plans.h>
#include <extension/memory/CpuDevice.h>

namespace py = pybind11;

namespace torch_lms {
namespace {

c10::Storage storage_of(const py::handle& object) {
  if (THPVariable_Check(object.ptr())) {
    const at::Tensor& tensor = THPVariable_Unpack(object.ptr());
    if (!tensor.has_storage()) {
      throw PageoutRefused(
          "expected a tensor with a storage, found one of layout " +
          std::string(c10::str(tensor.layout())) +
          " or a wrapper; page out the tensors it is made of (for a sparse tensor: "
          "tensor.indices() and tensor.values())");
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

void check_not_forked() {
  if (in_forked_child()) {
    throw Error(
        "expected the process that torch_lms was first used in, found a child forked from it; "
        "storages stay where they are in a forked child: start it with 'spawn' to page there");
  }
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

Runtime& runtime() {
  return Runtime::get();
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
  const PyThreadState* const first = PyInterpreterState_ThreadHead(PyInterpreterState_Get());
  runtime().callbacks.note_other_threads(
      first != PyThreadState_Get() ||
      PyThreadState_Next(const_cast<PyThreadState*>(first)) != nullptr);
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

Device& device_named(const std::string& name) {
  Device* device = runtime().devices.find(c10::Device(name));
  if (device == nullptr) {
    throw Error(
        "expected a device with paging (cpu, or cuda:N in a build with CUDA), found '" + name +
        "'");
  }
  return *device;
}

void enable(const std::string& device_name, size_t limit_bytes, size_t min_bytes) {
  check_not_forked();
  const py::gil_scoped_release no_gil;
  runtime().policy.enable(device_named(device_name), limit_bytes, min_bytes);
}

void disable() {
  check_not_forked();
  const py::gil_scoped_release no_gil;
  runtime().disable();
}

std::string attention() {
  switch (runtime().policy.attention()) {
    case Attention::kOff:
      return "off";
    case Attention::kLearning:
      return "learning";
    case Attention::kArmed:
      return "armed";
    case Attention::kAsleep:
      return "asleep";
  }
  return "unknown";
}

py::dict memory_report(const std::string& device_name) {
  check_not_forked();
  MemoryReport report;
  {
    const py::gil_scoped_release no_gil;
    report = runtime().policy.report(device_named(device_name));
  }
  py::dict values;
  values["limit_bytes"] = report.limit_bytes;
  values["allocated_bytes"] = report.allocated_bytes;
  values["reserved_bytes"] = report.reserved_bytes;
  values["movable_bytes"] = report.movable_bytes;
  values["in_use_bytes"] = report.in_use_bytes;
  values["fixed_bytes"] = report.fixed_bytes;
  values["leaving_bytes"] = report.leaving_bytes;
  values["unseen_bytes"] = report.unseen_bytes;
  values["held_bytes"] = report.held_bytes;
  values["other_bytes"] = report.other_bytes;
  return values;
}

py::dict stats(bool reset) {
  check_not_forked();
  Pager& pager = runtime().pager;
  Stats& counters = pager.stats();
  py::dict values;
  values["pageout_bytes"] = counters.pageout_bytes.load();
  values["pagein_bytes"] = counters.pagein_bytes.load();
  values["pageouts"] = counters.pageouts.load();
  values["pageins"] = counters.pageins.load();
  values["passive_pageins"] = counters.passive_pageins.load();
  values["prefetches"] = counters.prefetches.load();
  values["prefetch_hits"] = counters.prefetch_hits.load();
  values["cancelled_pageouts"] = counters.cancelled_pageouts.load();
  values["dropped_bytes"] = counters.dropped_bytes.load();
  values["recomputable_bytes"] = counters.recomputable_bytes.load();
  values["recomputed_bytes"] = counters.recomputed_bytes.load();
  values["recomputations"] = counters.recomputations.load();
  values["host_served"] = counters.host_served.load();
  values["limit_exceeded"] = counters.limit_exceeded.load();
  values["pagein_failures"] = counters.pagein_failures.load();
  values["allocation_retries"] = counters.allocation_retries.load();
  values["wait_us"] = counters.wait_us.load();
  values["paged_out_bytes"] = pager.paged_out_bytes();
  values["paged_out_storages"] = pager.paged_out_storages();
  values["tracked_storages"] = pager.table().size();
  HostPoolStats host;
  DeviceUse use;
  size_t limit_bytes = 0;
  const HostPool* seen = nullptr;
  runtime().devices.for_each([&](Device& device) {
    if (seen != device.pool().get()) {
      const HostPoolStats pool = device.pool()->stats();
      host.slab_bytes += pool.slab_bytes;
      host.used_bytes += pool.used_bytes;
      host.limit_bytes += pool.limit_bytes;
      seen = device.pool().get();
    }
    const DeviceUse of_device = device.use();
    use.allocated_bytes += of_device.allocated_bytes;
    use.peak_allocated_bytes += of_device.peak_allocated_bytes;
    limit_bytes += device.limit_bytes();
    if (reset) {
      device.reset_peak();
    }
  });
  values["host_bytes"] = host.slab_bytes;
  values["host_used_bytes"] = host.used_bytes;
  values["host_limit_bytes"] = host.limit_bytes;
  values["allocated_bytes"] = use.allocated_bytes;
  values["peak_allocated_bytes"] = use.peak_allocated_bytes;
  values["limit_bytes"] = limit_bytes;
  if (reset) {
    counters.reset();
  }
  return values;
}

void bind_errors(py::module_& module) {
  // The classes live in Python (torch_lms.errors): translated by name at run time.
  static py::object errors = py::module_::import("torch_lms.errors");
  errors.inc_ref(); // outlives the interpreter's teardown order
  py::register_exception_translator([](std::exception_ptr caught) {
    const auto raise = [](const char* name, const std::exception& error) {
      PyErr_SetString(errors.attr(name).ptr(), error.what());
    };
    try {
      if (caught) {
        std::rethrow_exception(caught);
      }
    } catch (const HostPoolFull& error) {
      raise("HostPoolFullError", error);
    } catch (const SpillFailed& error) {
      raise("SpillError", error);
    } catch (const PageoutRefused& error) {
      raise("PageoutError", error);
    } catch (const Error& error) {
      raise("LmsError", error);
    }
  });
  static_cast<void>(module);
}

/// See `Interpreter`.
void lend_interpreter() {
  Interpreter& python = interpreter();
  python.release_lock = [] {
    return PyGILState_Check() != 0 ? static_cast<void*>(PyEval_SaveThread()) : nullptr;
  };
  python.take_lock = [](void* state) { PyEval_RestoreThread(static_cast<PyThreadState*>(state)); };
  static std::atomic<unsigned long> main_thread{
      py::module_::import("threading").attr("main_thread")().attr("ident").cast<unsigned long>()};
  pthread_atfork(nullptr, nullptr, [] { main_thread.store(PyThread_get_thread_ident()); });
  python.on_main_thread = [] { return PyThread_get_thread_ident() == main_thread.load(); };
  python.on_python_thread = [] { return PyGILState_GetThisThreadState() != nullptr; };
  python.at_next_instruction = [](void (*call)()) {
    static std::atomic<void (*)()> pending{nullptr};
    pending.store(call);
    const auto run = [](void*) {
      call_own("torch_lms.swap.discovery", "make_known"); // if it raises, what is known will do
      pending.load()();
      return 0;
    };
    return Py_AddPendingCall(run, nullptr) == 0;
  };
}

/// Every tensor that Python's garbage collector knows. What it knows may be half made by another
/// thread, which finds it held by somebody else if it runs before that is over: nothing here gives
/// up Python's lock.
py::list tensors_of_program() {
  auto* const tensor_class = reinterpret_cast<PyTypeObject*>(THPVariableClass);
  py::list found;
  const py::list objects = py::module_::import("gc").attr("get_objects")();
  for (const py::handle object : objects) {
    if (PyType_IsSubtype(Py_TYPE(object.ptr()), tensor_class) != 0) {
      found.append(object);
    }
  }
  return found;
}

/// A function of the module: refused in a forked child, run without Python's lock.
template <typename Call>
void define(py::module_& module, const char* name, Call call) {
  module.def(
      name,
      [call] {
        check_not_forked();
        call(runtime());
      },
      py::call_guard<py::gil_scoped_release>());
}

void bind_requests(py::module_& module) {
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
}

/// Nobody waits for these transfers any more: what failed stays where it is.
void stop_at_exit(CudaEntityTransferQueue& queue) {
  queue.start_actions(); // what has been enqueued without a worker is worked off
  try {
    queue.wait_and_stop_actions();
  } catch (const std::exception&) {
  }
}

void bind_queues(py::module_& module) {
  define(module, "start_pageouts", [](Runtime& all) { all.pager.out_queue().start_actions(); });
  define(module, "start_pageins", [](Runtime& all) { all.pager.in_queue().start_actions(); });
  define(module, "hold_pageins", [](Runtime& all) {
    all.pager.in_queue().start_actions();
    all.pager.in_queue().wait_and_stop_actions();
    all.pager.commit_finished();
    all.pager.in_queue().open();
  });
  define(module, "wait_pageouts", [](Runtime& all) { all.manual.wait_pageouts(); });
  define(module, "wait_pageins", [](Runtime& all) { all.manual.wait_pageins(); });
  define(module, "pagein_all", [](Runtime& all) { all.manual.pagein_all(); });
  module.def(
      "shutdown",
      [] {
        if (!in_forked_child()) {
          stop_at_exit(runtime().pager.out_queue());
          stop_at_exit(runtime().pager.in_queue());
        }
      },
      py::call_guard<py::gil_scoped_release>());
}

void bind_automatic_mode(py::module_& module) {
  module.def("enable", &enable);
  module.def("disable", &disable);
  module.def("stats", &stats, py::arg("reset") = false);
  module.def("attention", &attention);
  module.def("memory_report", &memory_report);
  module.def("tensors_of_program", &tensors_of_program);
  module.def("discover", [](const py::sequence& objects) {
    const auto storages = storages_of(objects);
    const py::gil_scoped_release no_gil;
    runtime().lookup.discover(storages);
  });
  // Who asks for its bytes gets an error with this message, until it is given others (`set_data`).
  module.def("take_bytes", [](const at::Tensor& tensor, const std::string& message) {
    auto empty = c10::make_intrusive<c10::StorageImpl>(
        c10::StorageImpl::use_byte_size_t(),
        0,
        c10::DataPtr(nullptr, tensor.device()),
        nullptr,
        /*resizable=*/false);
    empty->release_data_and_set_meta_custom_data_ptr_error_msg_(message);
    tensor.unsafeGetTensorImpl()->set_storage_keep_dtype(c10::Storage(std::move(empty)));
  });
  // Who asks for the bytes of a storage gets an error with this message, until it is opened.
  module.def("close_storage", [](const at::Tensor& tensor, const std::string& message) {
    tensor.storage().unsafeGetStorageImpl()->release_data_and_set_meta_custom_data_ptr_error_msg_(
        message); // it releases nothing
  });
  module.def("open_storage", [](const at::Tensor& tensor) {
    compat::allow_access(*tensor.storage().unsafeGetStorageImpl());
  });
  define(module, "wake", [](Runtime& all) { all.policy.wake(); });
  module.def("configure_host", [](size_t limit_bytes, const std::string& spill_dir) {
    check_not_forked();
    runtime().devices.configure_host(HostOptions{limit_bytes, spill_dir});
  });
  module.def("total_bytes", [](const std::string& device) {
    // Asking for it opens no spill file yet.
    return device == "cpu" ? CpuDevice::memory_bytes() : device_named(device).total_bytes();
  });
  module.def("count_cpu_allocations", [] {
    static_cast<CpuDevice*>(runtime().devices.find(c10::Device(c10::kCPU)))->count();
  });
  module.def("observing_ops", [] { return runtime().callbacks.observing(); });
  module.def("in_forked_child", &in_forked_child);
  module.def("enable_chaos", [](uint64_t seed, int64_t period) {
    Runtime& all = runtime();
    all.pager.out_queue().start_actions();
    all.pager.in_queue().start_actions();
    all.chaos.begin(seed, period);
    all.policy.track_all(1);
  });
}

} // namespace
} // namespace torch_lms

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using namespace torch_lms;
  module.doc() = "The compiled core of torch_lms. Use torch_lms and torch_lms.swap instead.";
  lend_interpreter();
  bind_errors(module);
  bind_requests(module);
  bind_queues(module);
  bind_automatic_mode(module);
  bind_plans(module);
  bind_exchange(module);
  module.attr("has_materializer") = compat::kHasMaterializer;
#ifdef TORCH_LMS_WITH_CUDA
  module.attr("has_cuda") = true;
#else
  module.attr("has_cuda") = false;
#endif
}
