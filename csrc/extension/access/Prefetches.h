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
/// Where the link is slower than the plan believes, or the program has more in use than it knows,
/// they would end sooner. So where the plan's limit alone holds some back, the plan is tried
/// without it, too: see Note [What takes least is kept].

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
  /// A cycle has ended: whether the plan's limit alone has held back any in it.
  bool end_cycle();

  void add(EntityPtr entity);
  void clear();

  /// Begins those that there is room for. See Note [Past what finds no piece].
  void begin();

 private:
  std::vector<EntityPtr> first(size_t* limit_bytes);
  void remove(const std::vector<EntityPtr>& settled);

  Pager& pager_;
  std::atomic<bool> any_{false};
  std::mutex mutex_; // guards what follows
  std::deque<EntityPtr> entities_;
  size_t limit_bytes_ = SIZE_MAX; // the plan's
  bool held_back_ = false; // any, in this cycle, by that alone
};

} // namespace torch_lms
