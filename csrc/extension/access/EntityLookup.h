#pragma once

#include <vector>

#include <c10/core/Storage.h>

#include <extension/access/Frame.h>
#include <extension/policy/Policy.h>

namespace torch_lms {

/// Which storages are entities, or become ones as the program uses them. A value that is copied:
/// ops reach what it refers to without a detour.
///
/// Thread-safe: every method may be called from any thread, with and without the GIL. `find` and
/// `find_sized` block on a shard of the table for what the thread's frame does not remember, the
/// others always.
class EntityLookup {
 public:
  EntityLookup(Pager& pager, const Policy& policy) : pager_(pager), policy_(policy) {}

  /// The size from which on a storage may be an entity. To be asked for by an op that has published
  /// its tick: what becomes an entity by hand after the answer is later than that. See Note [Who
  /// may still use a storage].
  size_t from_bytes() const noexcept {
    return pager_.tracks_by_hand() ? 0 : policy_.tracked_from_bytes();
  }

  /// By an op of the calling thread, whose frame it is; null if it has none and gets none.
  Entity* find(c10::StorageImpl& storage, Frame& frame) const {
    const size_t nbytes = bytes_of(storage);
    return nbytes >= from_bytes() ? find_sized(storage, nbytes, frame) : nullptr;
  }

  /// The same of a storage of `nbytes`, which is at least `from_bytes`.
  C10_ALWAYS_INLINE Entity* find_sized(c10::StorageImpl& storage, size_t nbytes, Frame& frame)
      const {
    if (!policy_.tracks(nbytes)) {
      return frame.recent.find(storage, nbytes, pager_);
    }
    return frame.recent.find_or_track(storage, nbytes, [&] {
      return find_or_track(storage, frame.depth > 1 ? FoundBy::kInnerOp : FoundBy::kOp);
    });
  }

  /// Of a storage whose address is taken outside of ops. Also one that no op has shown yet: another
  /// thread may page it out.
  EntityPtr find_for_address(c10::StorageImpl& storage) const;

  /// Makes storages known that automatic mode tracks, and that nobody may be using: see Note
  /// [Learn, sleep, arm].
  void discover(const std::vector<c10::Storage>& storages) const;

 private:
  EntityPtr find_or_track(c10::StorageImpl& storage, FoundBy by) const;

  Pager& pager_;
  const Policy& policy_;
};

} // namespace torch_lms
