#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <extension/access/CompiledPlan.h>

namespace torch_lms {

/// What the latest cycles under a plan took.
struct MeasuredPlan {
  std::string signature; ///< Of the plan; empty while none has been carried out.
  double step_us = 0; ///< The median of the latest cycles, from one's end to the next's; 0 before.
  size_t peak_bytes = 0; ///< The most that was in use at once in these.
  double wait_us = 0; ///< The median of what their ops have waited for memory.
};

/// Measures cycles that are carried out by a plan.
///
/// Thread-safe: every method may be called from any thread.
class StepMeter {
 public:
  using Clock = std::chrono::steady_clock;

  /// A cycle has ended that has followed a plan; null: none. `waited_us`: by ops for memory, ever.
  /// Returns what it took, in microseconds; 0 for the first one, whose beginning nobody has seen.
  double end_cycle(
      const std::shared_ptr<const CompiledPlan>& followed,
      size_t peak_bytes,
      int64_t waited_us,
      Clock::time_point now);

  void clear();

  MeasuredPlan measured() const;

 private:
  static constexpr size_t kMostCycles = 8;

  struct Cycle {
    double step_us;
    size_t peak_bytes;
    double wait_us;
  };

  mutable std::mutex mutex_; // guards what follows
  std::shared_ptr<const CompiledPlan> plan_;
  std::vector<Cycle> cycles_; // the latest, in any order
  size_t at_ = 0; // where the next goes
  bool in_step_ = false; // the cycle before followed the same plan
  Clock::time_point ended_; // the last one; the epoch if none has
  int64_t waited_us_ = 0; // until then
};

} // namespace torch_lms
