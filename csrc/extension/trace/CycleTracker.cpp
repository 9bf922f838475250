#include <extension/trace/CycleTracker.h>

namespace torch_lms {

bool CycleTracker::note_phase(bool backward) {
  if (in_backward_.load(std::memory_order_relaxed) == backward) {
    return false;
  }
  std::lock_guard<std::mutex> lock(mutex_);
  if (in_backward_.load(std::memory_order_relaxed) == backward) {
    return false;
  }
  in_backward_.store(backward, std::memory_order_relaxed);
  if (backward) {
    backward_began_ = now();
    return false;
  }
  const uint64_t end = now();
  const uint64_t began = began_.load(std::memory_order_relaxed);
  // Who reads a new value of these sees the odd version, too.
  version_.fetch_add(1, std::memory_order_relaxed);
  forward_.store(backward_began_ - began, std::memory_order_release);
  length_.store(end - began, std::memory_order_release);
  began_.store(end, std::memory_order_release);
  number_.fetch_add(1, std::memory_order_release);
  version_.fetch_add(1, std::memory_order_release);
  return true;
}

CycleShape CycleTracker::shape() const noexcept {
  for (;;) {
    const uint64_t version = version_.load(std::memory_order_acquire);
    CycleShape shape;
    shape.forward = forward_.load(std::memory_order_acquire);
    shape.length = length_.load(std::memory_order_acquire);
    shape.began = began_.load(std::memory_order_acquire);
    shape.number = number_.load(std::memory_order_acquire);
    if (version % 2 == 0 && version_.load(std::memory_order_relaxed) == version) {
      return shape;
    }
  }
}

} // namespace torch_lms
