#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <random>

namespace torch_lms {

class Pager;

/// For tests: moves storages at random between ops, whatever the program does. Results
/// must be the same with it as without.
///
/// Thread-safe: every method may be called from any thread.
class Chaos {
 public:
  explicit Chaos(Pager& pager) : pager_(pager) {}

  /// From now on, after one op in `period` (at random), one entity goes out or comes back.
  void begin(uint64_t seed, int64_t period);
  void end();

  /// An outermost op of the calling thread has ended.
  void after_op() {
    if (const int64_t period = period_.load(std::memory_order_relaxed)) {
      strike(static_cast<uint64_t>(period));
    }
  }

 private:
  void strike(uint64_t period);

  Pager& pager_;
  std::atomic<int64_t> period_{0};
  std::mutex mutex_;
  std::mt19937_64 random_;
};

} // namespace torch_lms
