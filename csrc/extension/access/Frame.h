#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include <extension/access/OpKind.h>
#include <extension/access/OpRecipe.h>
#include <extension/transfer/Pager.h>

namespace torch_lms {

/// Which entities the ops of one thread have been using: most ops use what the last ones used,
/// and to find them again here takes no lock.
///
/// Not thread-safe: a thread's own.
class RecentEntities {
 public:
  /// The storage's entity if it has been remembered; else what `find` returns, remembered.
  template <typename Find>
  Entity* get(c10::StorageImpl& storage, Find&& find) {
    EntityPtr& known = slots_[(reinterpret_cast<uintptr_t>(&storage) >> 5) % slots_.size()];
    if (known != nullptr && known->stands_for(storage)) {
      return known.get();
    }
    EntityPtr found = find();
    if (found != nullptr) {
      known = std::move(found);
      return known.get();
    }
    return nullptr;
  }

 private:
  std::array<EntityPtr, 256> slots_;
};

/// What one thread's ops have pinned, and what has been given out to it.
///
/// Not thread-safe: a thread's own.
struct Frame {
  int64_t depth = 0; ///< Records inside of the outermost op, itself included; 0 outside.
  bool holding = false; ///< What the outermost op calls is watched, too.
  bool collective = false; ///< Threads of a library use what it uses, and all that it makes inside.
  bool sealed =
      false; ///< The outermost op is one of PyTorch's with a kernel: it may have a recipe.
  bool inside_kernel = false; ///< The outermost op of this thread is part of another thread's.
  uint64_t now = 0; ///< The time of the outermost op.
  std::vector<Entity*> pinned; ///< The table keeps what is pinned.
  std::vector<Entity*> served; ///< Of these, the ones used in their host copies.
  std::vector<Entity*> written; ///< Of these, the ones that the op may write to, while it begins.
  std::vector<bool> wrote; ///< Whether the op may write to each of `pinned`, while it is recorded.
  uint64_t recording = 0; ///< In which the outermost op began.
  int32_t place = -1; ///< Of the outermost op in the cycle, if it has one.
  std::shared_ptr<OpRecipe> recipe; ///< Of the outermost op, if somebody wants it.
  c10::Storage before; ///< What it overwrites, as it was, if it is to be auditioned.
  std::vector<EntityPtr> given_out; ///< Whose addresses the thread has been given, and pinned.
  std::vector<EntityPtr> given_out_on_host; ///< Of these, those in their host copies.
  RecentEntities recent;
  OpKinds kinds;
  int8_t on_main_thread = -1; ///< -1: not asked yet.
};

} // namespace torch_lms
