#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <vector>

#include <extension/transfer/Pager.h>

namespace torch_lms {

/// Note [Past what finds no piece]
/// Where memory is full, what has been asked for first comes in first, and those behind it wait.
/// But free memory lies in pieces, and one that finds none as large as it needs, though the limit
/// has room for it, would keep the link idle until its op begins. So others pass it, as long as
/// there would be room for all together: the plan has counted them all.

/// Note [A plan's room]
/// A device's limit is more than its plan's, since free memory lies in pieces. Copies in keep to
/// the plan's. Those that begin as soon as the device has room end no sooner, for the link has as
/// much to do; but the program's peak is then higher than its plan says.
///
/// A program may have more in use than its plan knows. Then the plan's limit has no room, and what
/// has been asked for comes with its op, although the device has room. Once that was so for more
/// than a quarter of a cycle's bytes, only the device's limit holds until there is another plan.

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

  /// The plan's that asks from now on; `SIZE_MAX` for none. See Note [A plan's room].
  void set_limit(size_t limit_bytes);
  /// A plan has come that may know what the program has in use.
  void trust();
  /// A cycle has ended.
  void end_cycle();

  void add(EntityPtr entity);
  void clear();

  /// Begins those that there is room for. See Note [Past what finds no piece].
  void begin();

 private:
  std::vector<EntityPtr> first(size_t* limit_bytes);
  void remove(const std::vector<EntityPtr>& settled);
  void note_held_back(const EntityPtr& entity);
  void note_settled(const EntityPtr& entity, bool missed);

  Pager& pager_;
  std::atomic<bool> any_{false};
  std::mutex mutex_; // guards what follows
  std::deque<EntityPtr> entities_;
  size_t limit_bytes_ = SIZE_MAX;
  bool trusted_ = true; // whether that holds
  EntityPtr held_back_; // only by the plan's limit
  size_t asked_bytes_ = 0; // in this cycle
  size_t missed_bytes_ = 0; // of these, what has come with its op since it was held back
};

} // namespace torch_lms
