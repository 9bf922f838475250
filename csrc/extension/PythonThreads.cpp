#include <extension/PythonThreads.h>

#include <dlfcn.h>
#include <link.h>

#include <map>
#include <memory>
#include <utility>

#include <pybind11/pybind11.h>

namespace py = pybind11;

namespace torch_lms {
namespace {

/// Python's own data, by what the dynamic linker says of it; nothing where it does not.
std::pair<uintptr_t, size_t> data_of_python() {
  void* const data = dlsym(RTLD_DEFAULT, "_PyRuntime");
  Dl_info info;
  ElfW(Sym)* symbol = nullptr;
  if (data == nullptr ||
      dladdr1(data, &info, reinterpret_cast<void**>(&symbol), RTLD_DL_SYMENT) == 0 ||
      symbol == nullptr) {
    return {0, 0};
  }
  return {reinterpret_cast<uintptr_t>(data), symbol->st_size};
}

/// Where it is not known which data is Python's, any may be.
bool owns_address(uintptr_t address) {
  static const std::pair<uintptr_t, size_t> data = data_of_python();
  return data.second == 0 || (address >= data.first && address - data.first < data.second);
}

#if PY_VERSION_HEX >= 0x030B0000 // before it Python does not know the system's numbers

/// To look at frames makes objects. No garbage is collected for that: the program's finalizers
/// would run here, in the middle of a wait, and may ask for page-outs themselves.
class NoCollection {
 public:
  NoCollection() noexcept : enabled_(PyGC_Disable() != 0) {}
  ~NoCollection() {
    if (enabled_) {
      PyGC_Enable();
    }
  }
  NoCollection(const NoCollection&) = delete;
  NoCollection& operator=(const NoCollection&) = delete;

 private:
  const bool enabled_;
};

py::object frame_of(PyThreadState* thread) {
  return py::reinterpret_steal<py::object>(
      reinterpret_cast<PyObject*>(PyThreadState_GetFrame(thread)));
}

py::object caller_of(const py::object& frame) {
  return py::reinterpret_steal<py::object>(
      reinterpret_cast<PyObject*>(PyFrame_GetBack(reinterpret_cast<PyFrameObject*>(frame.ptr()))));
}

int instruction_of(const py::object& frame) {
  return PyFrame_GetLasti(reinterpret_cast<PyFrameObject*>(frame.ptr()));
}

/// Nobody else uses the list of threads: Python's lock is held.
template <typename Visit>
void visit_threads(const Visit& visit) {
  PyThreadState* thread = PyInterpreterState_ThreadHead(PyInterpreterState_Get());
  for (; thread != nullptr; thread = PyThreadState_Next(thread)) {
    if (thread != PyThreadState_Get()) {
      visit(thread);
    }
  }
}

/// The innermost function of each thread, and its instruction. Frames are not held, since locals
/// would live longer by that: where another gets a frame's address, its thread is waited for a
/// little longer.
class Places final : public PlacesOfThreads {
 public:
  Places() {
    const NoCollection looking;
    visit_threads([&](PyThreadState* thread) {
      if (const py::object frame = frame_of(thread)) {
        places_[thread->native_thread_id] = {frame.ptr(), instruction_of(frame)};
      }
    });
  }

  bool has_moved(uint64_t number) const override {
    const NoCollection looking;
    const auto place = places_.find(number);
    bool moved = place != places_.end(); // also where it has ended
    visit_threads([&](PyThreadState* thread) {
      moved = moved && (thread->native_thread_id != number || !is_at(thread, place->second));
    });
    return moved;
  }

 private:
  using Place = std::pair<const void*, int>;

  /// Also where Python code that the op calls runs.
  static bool is_at(PyThreadState* thread, const Place& place) {
    for (py::object frame = frame_of(thread); frame; frame = caller_of(frame)) {
      if (frame.ptr() == place.first) {
        return instruction_of(frame) == place.second;
      }
    }
    return false;
  }

  std::map<uint64_t, Place> places_;
};

#endif

} // namespace

void lend_threads(Interpreter& python) noexcept {
  python.owns_address = &owns_address;
#if PY_VERSION_HEX >= 0x030B0000
  python.note_places = []() -> std::unique_ptr<PlacesOfThreads> {
    return std::make_unique<Places>();
  };
#endif
}

} // namespace torch_lms
