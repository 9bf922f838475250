#include <extension/PythonThreads.h>

#include <dlfcn.h>
#include <link.h>

#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <set>
#include <utility>

#include <pybind11/pybind11.h>

namespace py = pybind11;

namespace torch_lms {
namespace {

/// Python's own data, by what the dynamic linker says of it; nothing where it does not.
std::pair<uintptr_t, size_t> find_data() {
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

std::pair<uintptr_t, size_t> data_of_python{0, 0};

bool owns_address(uintptr_t address) {
  return address >= data_of_python.first && address - data_of_python.first < data_of_python.second;
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

int instruction_named(const char* name) {
  const py::dict numbers = py::module_::import("opcode").attr("opmap");
  return numbers.contains(name) ? numbers[name].cast<int>() : -1;
}

/// Where loops and functions begin: by these instructions Python lets others have its lock, and no
/// value of the program's takes part in them. Each Python has other numbers for them.
std::array<int, 2> begins{-1, -1};

void learn_instructions() {
  begins = {instruction_named("JUMP_BACKWARD"), instruction_named("RESUME")};
}

/// Whether what a function is at is no call of anything.
bool calls_nothing(const py::object& frame) {
  const auto code = py::reinterpret_steal<py::object>(
      reinterpret_cast<PyObject*>(PyFrame_GetCode(reinterpret_cast<PyFrameObject*>(frame.ptr()))));
  // As it was compiled: Python replaces instructions that run often.
  const auto instructions = py::reinterpret_steal<py::object>(
      PyCode_GetCode(reinterpret_cast<PyCodeObject*>(code.ptr())));
  const int at = instruction_of(frame);
  if (!instructions || at < 0 || at >= PyBytes_Size(instructions.ptr())) {
    PyErr_Clear(); // for want of memory
    return false;
  }
  const int instruction = static_cast<unsigned char>(PyBytes_AsString(instructions.ptr())[at]);
  return std::find(begins.begin(), begins.end(), instruction) != begins.end();
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
/// little longer. A thread whose function calls nothing there is nowhere.
class Places final : public PlacesOfThreads {
 public:
  Places() {
    const NoCollection looking;
    visit_threads([&](PyThreadState* thread) {
      if (const py::object frame = frame_of(thread)) {
        places_[thread->native_thread_id] = {
            calls_nothing(frame) ? nullptr : frame.ptr(), instruction_of(frame)};
      }
    });
  }

  void add_moved(std::set<uint64_t>& past) const override {
    const NoCollection looking;
    std::set<uint64_t> there;
    visit_threads([&](PyThreadState* thread) {
      const auto place = places_.find(thread->native_thread_id);
      if (place != places_.end() && past.count(place->first) == 0 && is_at(thread, place->second)) {
        there.insert(place->first);
      }
    });
    for (const auto& [number, place] : places_) {
      if (there.count(number) == 0) { // also where it has ended
        past.insert(number);
      }
    }
  }

  bool knows(uint64_t number) const override {
    bool is = false;
    visit_threads([&](PyThreadState* thread) { is = is || thread->native_thread_id == number; });
    return is;
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

bool has_other_threads() {
  const PyThreadState* const first = PyInterpreterState_ThreadHead(PyInterpreterState_Get());
  return first != PyThreadState_Get() ||
         PyThreadState_Next(const_cast<PyThreadState*>(first)) != nullptr;
}

void lend_threads(Interpreter& python) {
  data_of_python = find_data();
  python.owns_address = data_of_python.second != 0 ? &owns_address : nullptr;
#if PY_VERSION_HEX >= 0x030B0000
  learn_instructions();
  python.note_places = []() -> std::unique_ptr<PlacesOfThreads> {
    return std::make_unique<Places>();
  };
#endif
}

} // namespace torch_lms
