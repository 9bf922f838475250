#pragma once

#include <atomic>
#include <deque>
#include <mutex>

#include <extension/transfer/Pager.h>

namespace torch_lms {

/// What a plan has asked to come in, in that order, and there has been no room for.
///
/// Thread-safe: every method may be called from any thread. Nothing is called under the mutex.
class Prefetches {
 public:
  explicit Prefetches(Pager& pager) : pager_(pager) {}

  /// Takes no lock: every op asks.
  bool any() const noexcept {
    return any_.load(std::memory_order_relaxed);
  }

  void add(EntityPtr entity);
  void clear();

  /// Begins copies in until there is no room for the next.
  void begin();

 private:
  Pager& pager_;
  std::atomic<bool> any_{false};
  std::mutex mutex_; // guards what follows
  std::deque<EntityPtr> entities_;
};

} // namespace torch_lms
