#pragma once

#include <string>

#include <c10/core/Device.h>
#include <pybind11/pybind11.h>

#include <entity/Error.h>

#include <extension/Runtime.h>
#include <extension/base/Fork.h>

namespace torch_lms {

/// Adds the functions that are called with tensors and storages.
void bind_storages(pybind11::module_& module);
/// Adds the functions that tell how it stands: counters, memory, attention.
void bind_reports(pybind11::module_& module);

// What several of the module's functions need. Thread-safe; blocks on nothing but mutexes.

inline Runtime& runtime() {
  return Runtime::get();
}

inline void check_not_forked() {
  if (in_forked_child()) {
    throw Error(
        "expected the process that torch_lms was first used in, found a child forked from it; "
        "storages stay where they are in a forked child: start it with 'spawn' to page there");
  }
}

inline Device& device_named(const std::string& name) {
  Device* device = runtime().devices.find(c10::Device(name));
  if (device == nullptr) {
    throw Error(
        "expected a device with paging (cpu, or cuda:N in a build with CUDA), found '" + name +
        "'");
  }
  return *device;
}

} // namespace torch_lms
