#include <c10/core/impl/SwapDevice.h>

namespace c10 {
namespace impl {
namespace {

// Written while libraries are loaded, read afterwards.
SwapDeviceTypes& types() {
  static auto* all = new SwapDeviceTypes{};
  return *all;
}

thread_local bool is_worker = false;

} // namespace

SwapDevice::~SwapDevice() = default;

void register_swap_devices(DeviceType type, SwapDeviceType devices) {
  types()[static_cast<size_t>(type)] = devices;
}

const SwapDeviceTypes& swap_device_types() {
  return types();
}

bool on_swap_worker() noexcept {
  return is_worker;
}

void mark_swap_worker() noexcept {
  is_worker = true;
}

} // namespace impl
} // namespace c10
