#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>

namespace torch_lms {

/// What a plan asks of the host between ops.
enum class Action : uint8_t { kPageout, kPagein, kRecompute };

/// How long the host works on what moves storages, without what it waits for.
///
/// Thread-safe: every method may be called from any thread. Blocks on nothing.
class ActionTimes {
 public:
  using Clock = std::chrono::steady_clock;
  class Timer;

  /// Counts anew. Until `end`.
  void begin() noexcept;
  void end() noexcept {
    on_.store(false, std::memory_order_relaxed);
  }

  /// By all actions, since `begin`.
  std::chrono::nanoseconds spent() const noexcept;
  /// What one of these takes; 0 if there was none.
  double mean_us(Action action) const noexcept;

  /// The calling thread has waited for so long, perhaps within actions.
  static void note_wait(std::chrono::nanoseconds waited) noexcept;

 private:
  static constexpr size_t kActions = 3;

  struct Total {
    std::atomic<int64_t> count{0};
    std::atomic<int64_t> spent_ns{0};
  };

  std::atomic<bool> on_{false};
  Total totals_[kActions];
};

/// While one lives the calling thread works on an action. What is nested in it counts for itself.
class ActionTimes::Timer {
 public:
  Timer(ActionTimes& times, Action action) noexcept;
  ~Timer();
  Timer(const Timer&) = delete;
  Timer& operator=(const Timer&) = delete;

  /// It is one action more; otherwise it is a part of others.
  void count() noexcept {
    counts_ = true;
  }

 private:
  friend class ActionTimes;

  ActionTimes* times_; // null: off
  Action action_;
  bool counts_ = false;
  Timer* outer_ = nullptr;
  std::chrono::nanoseconds others_{0}; // nested timers, and waits
  Clock::time_point began_;
};

} // namespace torch_lms
