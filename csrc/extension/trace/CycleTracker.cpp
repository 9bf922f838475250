#include <extension/trace/CycleTracker.h>

namespace torch_lms {

bool CycleTracker::change_phase(bool backward) {
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
  begin_cycle(backward_began_ - began, end - began, end);
  return true;
}

void CycleTracker::forget() {
  std::lock_guard<std::mutex> lock(mutex_);
  in_backward_.store(false, std::memory_order_relaxed);
  begin_cycle(0, 0, now());
}

/// Under the mutex.
void CycleTracker::begin_cycle(uint64_t forward, uint64_t length, uint64_t began) {
  // Who reads a new value of these sees the odd version, too.
  version_.fetch_add(1, std::memory_order_relaxed);
  forward_.store(forward, std::memory_order_release);
  length_.store(length, std::memory_order_release);
  began_.store(began, std::memory_order_release);
  number_.fetch_add(1, std::memory_order_release);
  version_.fetch_add(1, std::memory_order_release);
}

void CycleTracker::read_shape(KnownShape& known) const noexcept {
  for (;;) {
    const uint64_t version = version_.load(std::memory_order_acquire);
    known.shape.forward = forward_.load(std::memory_order_acquire);
    known.shape.length = length_.load(std::memory_order_acquire);
    known.shape.began = began_.load(std::memory_order_acquire);
    known.shape.number = number_.load(std::memory_order_acquire);
    if (version % 2 == 0 && version_.load(std::memory_order_relaxed) == version) {
      known.version = version;
      return;
    }
  }
}

} // namespace torch_lms
