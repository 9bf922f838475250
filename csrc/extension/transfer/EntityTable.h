#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include <c10/core/StorageImpl.h>
#include <c10/util/flat_hash_map.h>

#include <extension/transfer/Entity.h>

namespace torch_lms {

/// Note [One place to look entities up]
/// A storage's entity is found by the storage's address, here, wherever its bytes are. Its
/// pointer is not looked at: another thread's page-in or page-out may be replacing it, until
/// the entity has been pinned. An entity holds its storage weakly, so that an address in the
/// table is never another storage's.

/// Note [Storages that change their memory]
/// An entity stands for a storage's memory of one size. A storage that is resized gets another
/// entity, which takes over what the program has pinned; but not while an op uses the first one:
/// the op may have resized its output itself, and write to it still, and another entity would
/// not be pinned.

/// The entities of all storages that have one. Entries of storages that have died are swept out
/// as the table grows, but not while ops use them: these hold plain pointers to what they have
/// pinned.
///
/// Thread-safe: every method may be called from any thread that holds the storage, with and
/// without the GIL. They block on a shard's mutex, which is held for a lookup, and no longer.
class EntityTable {
 public:
  /// Null if the storage has no entity.
  EntityPtr find(const c10::StorageImpl& storage);

  /// Whether it has one, or had one before it was resized.
  bool lists(const c10::StorageImpl& storage);

  /// The storage's entity, made by `make` (which may decline) if there is none or the one there
  /// is belongs to memory that the storage no longer holds. `make` runs under the shard's
  /// mutex: nobody moves the bytes of a storage that has no entity.
  template <typename Make>
  EntityPtr find_or_make(const c10::StorageImpl& storage, Make&& make) {
    return visit_or_make(storage, std::forward<Make>(make), [](Entity&) {});
  }

  /// The same, and it is fixed.
  template <typename Make>
  EntityPtr fix(const c10::StorageImpl& storage, Make&& make) {
    return visit_or_make(storage, std::forward<Make>(make), [](Entity& entity) { entity.fix(); });
  }

  /// Takes one `fix` back. Returns false if there is none.
  bool unfix(const c10::StorageImpl& storage);

  void for_each(const std::function<void(const EntityPtr&)>& visit);

  /// Number of entries, dead ones included.
  size_t size();

  /// Changes before a storage gets an entity: a storage that had none has none while it stays the
  /// same. Takes no lock. See Note [Who may still use a storage]: an op that finds it unchanged has
  /// published its tick before, and an entity's tick is taken after the change.
  uint64_t changes() const noexcept {
    return changes_.load(std::memory_order_seq_cst);
  }

 private:
  struct Shard {
    std::mutex mutex;
    ska::flat_hash_map<const c10::StorageImpl*, EntityPtr> entities;
    std::vector<EntityPtr> retired; // replaced, and perhaps pinned
    size_t added = 0; // since the last sweep
  };

  /// `visit` runs under the mutex as well, so that no other entity takes the place of this one.
  template <typename Make, typename Visit>
  EntityPtr visit_or_make(const c10::StorageImpl& storage, Make&& make, Visit&& visit) {
    Shard& shard = shard_of(storage);
    std::vector<EntityPtr> dead; // destroyed after unlocking
    std::lock_guard<std::mutex> lock(shard.mutex);
    const auto at = shard.entities.find(&storage);
    EntityPtr entity = at != shard.entities.end() ? at->second : nullptr;
    const bool stays = entity != nullptr &&
                       (entity->stands_for(storage) || entity->used_by_ops() || !entity->retire());
    if (!stays) {
      changes_.fetch_add(1, std::memory_order_seq_cst);
      EntityPtr made = make();
      if (made == nullptr) {
        return nullptr;
      }
      if (entity != nullptr) {
        shard.retired.push_back(entity);
        at->second = made;
        for (; entity->fixed(); entity->unfix()) {
          made->fix();
        }
      } else {
        shard.entities.emplace(&storage, made);
      }
      entity = std::move(made);
      sweep(shard, dead);
    }
    visit(*entity);
    return entity;
  }

  Shard& shard_of(const c10::StorageImpl& storage) {
    return shards_[(reinterpret_cast<uintptr_t>(&storage) >> 6) % shards_.size()];
  }
  static void sweep(Shard& shard, std::vector<EntityPtr>& dead);

  std::array<Shard, 64> shards_;
  std::atomic<uint64_t> changes_{0};
};

} // namespace torch_lms
