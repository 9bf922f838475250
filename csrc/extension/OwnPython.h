#pragma once

#include <memory>

#include <pybind11/pybind11.h>

namespace torch_lms {

/// Note [Python code of ours]
/// Some of torch_lms's own Python code is called by the core, in the middle of whatever the program
/// does. It runs on the main thread, too, where Python delivers signals: a Ctrl-C may be raised
/// there, or what another handler raises, such as SystemExit. That is for the program, which gets
/// it between two of its instructions: an op's callback cannot raise anything. Errors of the code
/// itself are shown, and the program goes on.

inline void pass_on(pybind11::error_already_set& error, const char* module) {
  if (!error.matches(PyExc_Exception)) {
    auto kept = std::make_unique<pybind11::error_already_set>(error);
    const auto raise = [](void* given) {
      const std::unique_ptr<pybind11::error_already_set> own(
          static_cast<pybind11::error_already_set*>(given));
      own->restore();
      return -1;
    };
    if (Py_AddPendingCall(raise, kept.get()) == 0) {
      kept.release();
      return;
    }
  }
  error.discard_as_unraisable(module);
}

/// torch.compile takes no interest in the Python code that the calling thread runs while one of
/// these lives: where it has given up on a function of the program it looks at each one that this
/// calls, and what it runs to compile that are ops, inside of an op.
class WithoutDynamo {
 public:
  WithoutDynamo()
      : exchange_(pybind11::module_::import("torch._C._dynamo.eval_frame").attr("set_eval_frame")),
        before_(exchange_(pybind11::none())) {}
  ~WithoutDynamo() {
    try {
      exchange_(before_);
    } catch (pybind11::error_already_set& error) {
      error.discard_as_unraisable("torch_lms");
    }
  }
  WithoutDynamo(const WithoutDynamo&) = delete;
  WithoutDynamo& operator=(const WithoutDynamo&) = delete;

 private:
  const pybind11::object exchange_;
  const pybind11::object before_;
};

/// What the module's function returns; no object if it raises. Called with the GIL.
inline pybind11::object call_own(const char* module, const char* function) {
  try {
    const WithoutDynamo as_it_is;
    return pybind11::module_::import(module).attr(function)();
  } catch (pybind11::error_already_set& error) {
    pass_on(error, module);
    return {};
  }
}

} // namespace torch_lms
