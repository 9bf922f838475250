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
  /// The entity is used at the time `now` of the cycle. Most uses follow another closely: then the
  /// history learns of it with the next that does not, or when somebody asks.
  void record(uint64_t now, const CycleShape& cycle) noexcept {
    const uint64_t before = last_.load(std::memory_order_relaxed);
    last_.store(now, std::memory_order_relaxed);
    if (now - before > UseHistory::kLeastGap ||
        cycle.number != cycle_.load(std::memory_order_relaxed)) {
      record_place(before, now, cycle);
    }
  }

  /// A copy of the history, for more than one question.
  UseHistory history() const noexcept {
    while (busy_.test_and_set(std::memory_order_acquire)) {
    } // for as long as `record` takes
    UseHistory copy = history_;
    busy_.clear(std::memory_order_release);
    copy.extend(last());
    return copy;
  }

  /// The use that was recorded last; 0 if none was.
  uint64_t last() const noexcept {
    return last_.load(std::memory_order_relaxed);
  }

 private:
  void record_place(uint64_t before, uint64_t now, const CycleShape& cycle) noexcept {
    if (!busy_.test_and_set(std::memory_order_acquire)) {
      history_.extend(before);
      history_.record(now, cycle);
      cycle_.store(cycle.number, std::memory_order_relaxed);
      busy_.clear(std::memory_order_release);
    }
  }

  std::atomic<uint64_t> last_{0};
  std::atomic<uint64_t> cycle_{~uint64_t{0}}; // of the use that the history has learnt of last
  mutable std::atomic_flag busy_ = ATOMIC_FLAG_INIT;
  UseHistory history_;
};

} // namespace torch_lms
