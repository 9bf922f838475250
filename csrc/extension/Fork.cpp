#include <extension/Fork.h>

#include <pthread.h>

#include <atomic>

#include <extension/Device.h>

namespace torch_lms {
namespace {

std::atomic<bool> forked{false};

void in_child() {
  forked.store(true);
  // The parent may reuse the host memory of storages that the child still has:
  // the child gets a copy of its own at the same addresses.
  for_each_device([](Device& device, void*) { device.pool()->reclone_after_fork(); }, nullptr);
}

} // namespace

bool in_forked_child() noexcept {
  return forked.load(std::memory_order_relaxed);
}

void watch_forks() {
  static const int registered = pthread_atfork(nullptr, nullptr, &in_child);
  static_cast<void>(registered);
}

} // namespace torch_lms
