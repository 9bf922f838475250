#pragma once

#include <atomic>
#include <cstddef>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#include <entity/HostPool.h>

#include <extension/transfer/Entity.h>

namespace torch_lms {

/// The copies that the host keeps of what has come in, as long as nobody writes to it.
///
/// Thread-safe: every method may be called from any thread, with and without the GIL. They block on
/// nothing but mutexes; copies are given back outside of this one.
class KeptCopies {
 public:
  /// Whether there are to be any; those that there are go with `false`.
  void keep(bool keep);
  bool keeps() const noexcept {
    return keeps_.load(std::memory_order_relaxed);
  }
  /// An entity has come in that has one. Gives it back for want of a few bytes.
  void add(const EntityPtr& entity);
  /// Gives back the copies of storages that have died.
  void release_of_dead();
  /// The pool may ask for copies from now on.
  void lend_to(HostPool& pool);

 private:
  bool reclaim(HostPool::Urgency urgency);

  std::atomic<bool> keeps_{false};
  std::mutex mutex_; // guards what follows
  std::deque<std::weak_ptr<Entity>> kept_; // the oldest first
  size_t sweep_at_ = 256;
  std::vector<const HostPool*> pools_; // that ask for them
};

} // namespace torch_lms
