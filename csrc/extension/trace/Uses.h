#pragma once

#include <atomic>
#include <cstdint>

#include <extension/trace/UseHistory.h>

namespace torch_lms {

/// When one entity was used: what every op writes, and the policy reads.
///
/// Thread-safe: every method may be called from any thread. None blocks; a use that is recorded
/// while another thread reads or records the same entity's is recorded as the last one only,
/// which costs an expectation, never a result.
class Uses {
 public:
  /// The entity is used at the time `now` of the cycle.
  void record(uint64_t now, const CycleShape& cycle) noexcept {
    last_.store(now, std::memory_order_relaxed);
    if (!busy_.test_and_set(std::memory_order_acquire)) {
      history_.record(now, cycle);
      busy_.clear(std::memory_order_release);
    }
  }

  /// A copy of the history, for more than one question.
  UseHistory history() const noexcept {
    while (busy_.test_and_set(std::memory_order_acquire)) {
    } // for as long as `record` takes
    const UseHistory copy = history_;
    busy_.clear(std::memory_order_release);
    return copy;
  }

  /// The use that was recorded last; 0 if none was.
  uint64_t last() const noexcept {
    return last_.load(std::memory_order_relaxed);
  }

 private:
  std::atomic<uint64_t> last_{0};
  mutable std::atomic_flag busy_ = ATOMIC_FLAG_INIT;
  UseHistory history_;
};

} // namespace torch_lms
