#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>

#include <entity/UseHistory.h>

namespace torch_lms {

/// Counts the uses of entities and finds the cycles of a program that trains: a
/// cycle ends when a backward has ended and something else begins.
///
/// Thread-safe: every method may be called from any thread.
class CycleTracker {
 public:
  /// A new use; later than every one before.
  uint64_t next_use() noexcept {
    return uses_.fetch_add(1, std::memory_order_relaxed) + 1;
  }
  uint64_t now() const noexcept {
    return uses_.load(std::memory_order_relaxed);
  }

  /// An op has run, in backward or not. Returns whether a cycle has just ended.
  bool note_phase(bool backward);

  CycleShape shape() const;

 private:
  std::atomic<uint64_t> uses_{0};
  std::atomic<bool> in_backward_{false};
  mutable std::mutex mutex_;
  CycleShape shape_;
  uint64_t backward_began_ = 0;
};

} // namespace torch_lms
