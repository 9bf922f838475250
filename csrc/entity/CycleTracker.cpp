#include <entity/CycleTracker.h>

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
  shape_.forward = backward_began_ - shape_.began;
  shape_.length = now() - shape_.began;
  shape_.began = now();
  ++shape_.number;
  return true;
}

CycleShape CycleTracker::shape() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return shape_;
}

} // namespace torch_lms
