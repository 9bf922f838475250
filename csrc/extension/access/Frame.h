#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include <extension/access/KeptWatch.h>
#include <extension/access/OpKind.h>
#include <extension/access/OpRecipe.h>
#include <extension/base/ForeignCall.h>
#include <extension/trace/CycleTracker.h>
#include <extension/transfer/Pager.h>

namespace torch_lms {

/// Which entities the ops of one thread have been using, and which storages without one: most ops
/// use what the last ones used, and to find it again here takes no lock.
///
/// Not thread-safe: a thread's own.
class RecentEntities {
 public:
  /// The entity of a storage of `nbytes`, from `pager` if it is not remembered; null if it has
  /// none.
  Entity* find(c10::StorageImpl& storage, size_t nbytes, Pager& pager) {
    Slot& slot = slot_of(storage);
    if (slot.knows(storage, nbytes)) {
      return slot.entity.get();
    }
    const uint64_t changes = pager.table().changes(); // before the look-up
    return slot.without == &storage && slot.changes == changes
               ? nullptr
               : look_up(slot, storage, changes, pager);
  }

  /// The same; what is not remembered `track` finds, or makes.
  template <typename Track>
  Entity* find_or_track(c10::StorageImpl& storage, size_t nbytes, Track&& track) {
    Slot& slot = slot_of(storage);
    return slot.knows(storage, nbytes) ? slot.entity.get() : slot.keep(storage, track());
  }

 private:
  struct Slot {
    const c10::StorageImpl* with = nullptr; ///< Whose `entity` it is: no other's while that lives.
    const c10::StorageImpl* without = nullptr; ///< It had no entity after so many `changes`.
    uint64_t changes = 0;
    EntityPtr entity;

    bool knows(const c10::StorageImpl& storage, size_t nbytes) const noexcept {
      return with == &storage && entity->stands_for(nbytes);
    }
    Entity* keep(const c10::StorageImpl& storage, EntityPtr found) {
      if (found == nullptr) {
        return nullptr;
      }
      with = &storage;
      entity = std::move(found);
      return entity.get();
    }
  };

  static Entity* look_up(Slot& slot, c10::StorageImpl& storage, uint64_t changes, Pager& pager) {
    Entity* found = slot.keep(storage, pager.find(storage));
    // Not one that has been resized: it may be again, and have its entity back.
    if (found == nullptr && !pager.table().lists(storage)) {
      slot.without = &storage;
      slot.changes = changes;
    }
    return found;
  }

  Slot& slot_of(const c10::StorageImpl& storage) noexcept {
    return slots_[(reinterpret_cast<uintptr_t>(&storage) >> 5) % slots_.size()];
  }

  std::array<Slot, 256> slots_;
};

/// The first devices whose entities an op has used.
class UsedDevices {
 public:
  void add(Device* device) noexcept {
    if (device != devices_[0] && device != devices_[1]) {
      devices_[devices_[0] == nullptr ? 0 : 1] = device;
    }
  }
  void clear() noexcept {
    devices_ = {};
  }
  Device* first() const noexcept {
    return devices_[0];
  }
  Device* second() const noexcept {
    return devices_[1];
  }

 private:
  std::array<Device*, 2> devices_{};
};

/// Entities that somebody has pinned and uses. The table keeps what is pinned.
struct Pinned {
  std::vector<Entity*> pinned;
  std::vector<Entity*> served; ///< Of these, the ones used in their host copies.

  void release() noexcept {
    for (Entity* entity : served) {
      entity->end_service();
    }
    for (Entity* entity : pinned) {
      entity->unpin();
    }
    served.clear();
    pinned.clear();
  }
};

/// An entity whose address a thread has been given, and pinned.
struct GivenOut {
  EntityPtr entity;
  NativeCall call; ///< Who may go on using it: see Note [Functions that call Python].
  bool on_host = false; ///< It is the address of its host copy.

  void take_back() const noexcept {
    if (on_host) {
      entity->end_service();
    }
    entity->unpin();
  }
};

/// What one thread's ops have pinned, and what has been given out to it.
///
/// Not thread-safe: a thread's own.
struct Frame : Pinned {
  int64_t depth = 0; ///< Records inside of the outermost op, itself included; 0 outside.
  bool holding = false; ///< What the outermost op calls is watched, too.
  bool collective = false; ///< Threads of a library use what it uses, and all that it makes inside.
  bool large = false; ///< `LargeOps` has looked at the outermost op's inputs.
  bool sealed =
      false; ///< The outermost op is one of PyTorch's with a kernel: it may have a recipe.
  bool makes_empty = false; ///< The outermost op leaves what it makes for somebody else to fill.
  bool inside_kernel = false; ///< The outermost op of this thread is part of another thread's.
  bool timed = false; ///< The outermost op has a time: automatic mode wants to know what it uses.
  bool told = false; ///< Somebody is told of the outermost op when it ends.
  uint32_t idle_ops = 0; ///< In a row, that were observed while nothing was out or on its way.
  uint64_t now = 0; ///< That time.
  size_t name = 0; ///< A hash of the outermost op's.
  UsedDevices used; ///< By the outermost op.
  size_t inputs = 0; ///< How many of those pinned are the outermost op's own.
  std::vector<Entity*>
      written; ///< Of those pinned, the ones that the op may write to, while it begins.
  KeptWatch kept_watch; ///< Of these, the ones that the op takes an address of, and only reads.
  std::vector<bool> wrote; ///< Whether the op may write to each of `pinned`, while it is recorded.
  uint64_t recording = 0; ///< In which the outermost op began.
  int32_t place = -1; ///< Of the outermost op in the cycle, if it has one.
  bool binds = false; ///< The plan's op at that place makes something that an action names.
  bool acts = false; ///< There is something to do after it.
  std::shared_ptr<OpRecipe> recipe; ///< Of the outermost op, if somebody wants it.
  std::shared_ptr<OpRecipe> loose_recipe; ///< The same, for `DropsOnDemand`.
  c10::Storage before; ///< What it overwrites, as it was, if it is to be auditioned.
  std::vector<GivenOut> given_out;
  RecentEntities recent;
  KnownShape cycle;
  OpKinds kinds;
  int8_t on_main_thread = -1; ///< -1: not asked yet.

  void take_back_all() noexcept {
    for (const GivenOut& given : given_out) {
      given.take_back();
    }
    given_out.clear();
  }
};

Frame& make_frame(Frame** place);

/// The calling thread's. Blocks on nothing.
inline Frame& frame_of_thread() {
  // A plain pointer in the thread's own block is read in one instruction; an object that has
  // to be constructed and destroyed goes through two calls, and every op comes here twice.
  static thread_local Frame* frame __attribute__((tls_model("initial-exec"))) = nullptr;
  return frame != nullptr ? *frame : make_frame(&frame);
}

} // namespace torch_lms
