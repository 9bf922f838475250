#pragma once

#include <array>
#include <memory>
#include <mutex>
#include <vector>

#include <c10/core/StorageImpl.h>
#include <c10/util/flat_hash_map.h>
#include <entity/EntityStorageImpl.h>

namespace torch_lms {

using EntityPtr = std::shared_ptr<EntityStorageImpl>;

/// The entities of resident storages, by storage. (Paged-out storages carry
/// their entity in their mark.) An entity holds its storage weakly, so an address
/// in the table is never reused by another storage; entries of storages that have
/// died are swept out as the table grows.
///
/// Thread-safe: every method may be called from any thread.
class EntityTable {
 public:
  /// Null if the storage has no entity.
  EntityPtr find(const c10::StorageImpl* storage);

  /// The storage's entity, made by `make` if there is none or the one there is
  /// belongs to memory that the storage no longer holds.
  template <typename Make>
  EntityPtr find_or_make(const c10::StorageImpl* storage, Make&& make) {
    Shard& shard = shard_of(storage);
    std::vector<EntityPtr> dead; // destroyed after unlocking
    std::lock_guard<std::mutex> lock(shard.mutex);
    EntityPtr& entry = shard.entities[storage];
    if (entry == nullptr || entry->gone()) {
      dead.push_back(std::move(entry));
      entry = make();
      EntityPtr made = entry;
      sweep(shard, dead);
      return made;
    }
    return entry;
  }

  void for_each(const std::function<void(const EntityPtr&)>& visit);

  /// Number of entries, dead ones included.
  size_t size();

 private:
  struct Shard {
    std::mutex mutex;
    ska::flat_hash_map<const c10::StorageImpl*, EntityPtr> entities;
    size_t sweep_at = 64;
  };

  Shard& shard_of(const c10::StorageImpl* storage) {
    return shards_[(reinterpret_cast<uintptr_t>(storage) >> 6) % shards_.size()];
  }
  static void sweep(Shard& shard, std::vector<EntityPtr>& dead);

  std::array<Shard, 64> shards_;
};

} // namespace torch_lms
