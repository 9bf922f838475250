#include <atomic>
#include <exception>
#include <string>
#include <utility>

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <entity/Error.h>

#include <extension/OwnPython.h>
#include <extension/PythonThreads.h>
#include <extension/Runtime.h>
#include <extension/base/Compat.h>
#include <extension/base/Fork.h>
#include <extension/base/Interpreter.h>
#include <extension/bind_common.h>
#include <extension/bind_exchange.h>
#include <extension/bind_plans.h>
#include <extension/memory/CpuDevice.h>

namespace py = pybind11;

namespace torch_lms {
namespace {

void enable(const std::string& device_name, size_t limit_bytes, size_t min_bytes) {
  check_not_forked();
  runtime().callbacks.note_other_threads(has_other_threads());
  const py::gil_scoped_release no_gil;
  runtime().enable(device_named(device_name), limit_bytes, min_bytes);
}

void disable() {
  check_not_forked();
  const py::gil_scoped_release no_gil;
  runtime().disable();
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

/// Whether the calling thread holds Python's lock. Not `PyGILState_Check`: once there has been a
/// second interpreter, and when the first is at its end, that says so of every thread.
bool holds_lock() {
#if PY_VERSION_HEX >= 0x030D0000
  const PyThreadState* holder = PyThreadState_GetUnchecked();
#else
  const PyThreadState* holder = _PyThreadState_UncheckedGet();
#endif
  return holder != nullptr && holder == PyGILState_GetThisThreadState();
}

/// See `Interpreter`.
void lend_interpreter() {
  Interpreter& python = interpreter();
  python.release_lock = [] {
    return holds_lock() ? static_cast<void*>(PyEval_SaveThread()) : nullptr;
  };
  python.take_lock = [](void* state) { PyEval_RestoreThread(static_cast<PyThreadState*>(state)); };
  python.hold = [] { return static_cast<int>(PyGILState_Ensure()); };
  python.let_go = [](int state) { PyGILState_Release(static_cast<PyGILState_STATE>(state)); };
  static std::atomic<unsigned long> main_thread{
      py::module_::import("threading").attr("main_thread")().attr("ident").cast<unsigned long>()};
  pthread_atfork(nullptr, nullptr, [] { main_thread.store(PyThread_get_thread_ident()); });
  python.on_main_thread = [] { return PyThread_get_thread_ident() == main_thread.load(); };
  python.on_python_thread = [] { return PyGILState_GetThisThreadState() != nullptr; };
  lend_threads(python);
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

/// Nobody waits for these transfers any more: what failed stays where it is.
void stop_at_exit(CudaEntityTransferQueue& queue) {
  queue.start_actions(); // what has been enqueued without a worker is worked off
  queue.give_up_on_ops(); // one of a thread that Python does not wait for may never end
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
          // What runs later at exit needs no room: nothing goes out then.
          runtime().policy.disable();
          stop_at_exit(runtime().pager.out_queue());
          stop_at_exit(runtime().pager.in_queue());
        }
      },
      py::call_guard<py::gil_scoped_release>());
}

void bind_automatic_mode(py::module_& module) {
  module.def("enable", &enable);
  module.def("disable", &disable);
  module.def("tensors_of_program", &tensors_of_program);
  define(module, "wake", [](Runtime& all) { all.policy.wakefulness().wake(); });
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
  module.def("waits_for_unseen_ops", [] {
    const OpCallbacks::Waits waits = runtime().callbacks.waits();
    return std::make_pair(waits.all, waits.in_vain);
  });
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
  bind_storages(module);
  bind_queues(module);
  bind_automatic_mode(module);
  bind_reports(module);
  bind_plans(module);
  bind_exchange(module);
  module.attr("has_materializer") = compat::kHasMaterializer;
#ifdef TORCH_LMS_WITH_CUDA
  module.attr("has_cuda") = true;
#else
  module.attr("has_cuda") = false;
#endif
}
