#pragma once

#include <atomic>
#include <cstddef>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#include <entity/HostPool.h>

#include <extension/transfer/Entity.h>
#include <extension/transfer/EntityTable.h>

namespace torch_lms {

/// Note [Copies that come while the mode ends]
/// Whether a copy is kept is decided when the bytes come in, under the entity's lock; its entity is
/// added here afterwards, by the same thread. Another thread may have ended the mode in between: it
/// has not found the entity, so who adds it gives the copy back. That the mode has ended is written
/// and looked at under the mutex of the list: the one of the two that comes later sees the other.
///
/// The copies that the host keeps of what has come in, as long as nobody writes to it.
///
/// Thread-safe: every method may be called from any thread, with and without the GIL. They block on
/// nothing but mutexes; copies are given back outside of this one.
class KeptCopies {
 public:
  explicit KeptCopies(EntityTable& entities) : entities_(entities) {}

  /// Whether there are to be any; those that there are go with `false`. Throws nothing.
  void keep(bool keep);
  /// No block is watched any more, unless an op uses it at that moment, memory is short, or copies
  /// are kept again by now. Only where nothing has been dropped since they were kept: writes to
  /// what that is made from would go unseen. To hold a storage may take Python's lock, so none of
  /// ours is held. Throws nothing.
  void unwatch_all();
  bool keeps() const noexcept {
    return keeps_.load(std::memory_order_relaxed);
  }
  /// An entity has come in that has one. Gives it back for want of a few bytes, and where there are
  /// to be none any more.
  void add(const EntityPtr& entity);
  /// Gives back the copies of storages that have died.
  void release_of_dead();
  /// The pool may ask for copies from now on.
  void lend_to(HostPool& pool);

 private:
  bool reclaim(HostPool::Urgency urgency);
  void end_keeping(EntityPtr entity);

  EntityTable& entities_;
  std::atomic<bool> keeps_{false}; // written under the mutex
  std::mutex mutex_; // guards what follows
  std::deque<std::weak_ptr<Entity>> kept_; // the oldest first
  size_t sweep_at_ = 256;
  std::vector<const HostPool*> pools_; // that ask for them
};

} // namespace torch_lms
