#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include <extension/access/KeptWatch.h>
#include <extension/access/OpKind.h>
#include <extension/access/OpRecipe.h>
#include <extension/trace/CycleTracker.h>
#include <extension/transfer/Pager.h>

namespace torch_lms {

/// Which entities the ops of one thread have been using, and which storages without one: most ops
/// use what the last ones used, and to find it again here takes no lock.
///
/// Not thread-safe: a thread's own.
class RecentEntities {
 public:
  /// The storage's entity, from `pager` if it is not remembered; null if it has none.
  Entity* find(c10::StorageImpl& storage, Pager& pager) {
    Slot& slot = slot_of(storage);
    if (slot.knows(storage)) {
      return slot.entity.get();
    }
    const uint64_t changes = pager.table().changes(); // before the look-up
    if (slot.without == &storage && slot.changes == changes) {
      return nullptr;
    }
    Entity* found = slot.keep(pager.find(storage));
    // Not one that has been resized: it may be again, and have its entity back.
    if (found == nullptr && !pager.table().lists(storage)) {
      slot.without = &storage;
      slot.changes = changes;
    }
    return found;
  }

  /// The same; what is not remembered `track` finds, or makes.
  template <typename Track>
  Entity* find_or_track(c10::StorageImpl& storage, Track&& track) {
    Slot& slot = slot_of(storage);
    return slot.knows(storage) ? slot.entity.get() : slot.keep(track());
  }

 private:
  struct Slot {
    EntityPtr entity;
    const c10::StorageImpl* without = nullptr; ///< It had no entity after so many `changes`.
    uint64_t changes = 0;

    bool knows(const c10::StorageImpl& storage) const noexcept {
      return entity != nullptr && entity->stands_for(storage);
    }
    Entity* keep(EntityPtr found) {
      if (found == nullptr) {
        return nullptr;
      }
      entity = std::move(found);
      return entity.get();
    }
  };

  Slot& slot_of(const c10::StorageImpl& storage) noexcept {
    return slots_[(reinterpret_cast<uintptr_t>(&storage) >> 5) % slots_.size()];
  }

  std::array<Slot, 256> slots_;
};

/// What an op has used, as far as automatic mode wants to know.
struct UsedDevices {
  std::array<Device*, 2> devices{}; ///< The first ones.
  size_t input_bytes = 0;
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
  bool timed = false; ///< The outermost op has a time: automatic mode wants to know what it uses.
  uint64_t now = 0; ///< That time.
  std::vector<Entity*> pinned; ///< The table keeps what is pinned.
  size_t inputs = 0; ///< How many of these are the outermost op's own.
  std::vector<Entity*> served; ///< Of these, the ones used in their host copies.
  std::vector<Entity*> written; ///< Of these, the ones that the op may write to, while it begins.
  KeptWatch kept_watch; ///< Of these, the ones that the op takes an address of, and only reads.
  std::vector<bool> wrote; ///< Whether the op may write to each of `pinned`, while it is recorded.
  uint64_t recording = 0; ///< In which the outermost op began.
  int32_t place = -1; ///< Of the outermost op in the cycle, if it has one.
  bool binds = false; ///< The plan's op at that place makes something that an action names.
  std::shared_ptr<OpRecipe> recipe; ///< Of the outermost op, if somebody wants it.
  c10::Storage before; ///< What it overwrites, as it was, if it is to be auditioned.
  std::vector<EntityPtr> given_out; ///< Whose addresses the thread has been given, and pinned.
  std::vector<EntityPtr> given_out_on_host; ///< Of these, those in their host copies.
  RecentEntities recent;
  KnownShape cycle;
  OpKinds kinds;
  int8_t on_main_thread = -1; ///< -1: not asked yet.
};

} // namespace torch_lms
