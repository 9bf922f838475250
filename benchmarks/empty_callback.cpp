// A callback of PyTorch's that sees what paging's sees, and does nothing.

#include <memory>

#include <ATen/record_function.h>
#include <torch/extension.h>

namespace {

at::CallbackHandle handle = at::INVALID_CALLBACK_HANDLE;

std::unique_ptr<at::ObserverContext> on_begin(const at::RecordFunction&) {
  return nullptr;
}

void on_end(const at::RecordFunction&, at::ObserverContext*) {}

void install(bool outputs) {
  handle = at::addGlobalCallback(at::RecordFunctionCallback(&on_begin, &on_end)
                                     .needsInputs(true)
                                     .needsOutputs(outputs)
                                     .scopes({at::RecordScope::FUNCTION}));
}

void uninstall() {
  at::removeCallback(handle);
}

} // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("install", &install);
  module.def("uninstall", &uninstall);
}
