#include <extension/transfer/EntityTable.h>

#include <algorithm>

namespace torch_lms {
namespace {

constexpr size_t kSweepEvery = 64; // entities that are added to a shard

} // namespace

EntityPtr EntityTable::find(const c10::StorageImpl& storage) {
  Shard& shard = shard_of(storage);
  std::lock_guard<std::mutex> lock(shard.mutex);
  const auto at = shard.entities.find(&storage);
  return at != shard.entities.end() && at->second->stands_for(storage) ? at->second : nullptr;
}

bool EntityTable::lists(const c10::StorageImpl& storage) {
  Shard& shard = shard_of(storage);
  std::lock_guard<std::mutex> lock(shard.mutex);
  return shard.entities.count(&storage) != 0;
}

bool EntityTable::unfix(const c10::StorageImpl& storage) {
  Shard& shard = shard_of(storage);
  std::lock_guard<std::mutex> lock(shard.mutex);
  const auto at = shard.entities.find(&storage);
  if (at == shard.entities.end() || !at->second->fixed()) {
    return false;
  }
  at->second->unfix();
  return true;
}

void EntityTable::for_each(const std::function<void(const EntityPtr&)>& visit) {
  for (Shard& shard : shards_) {
    std::vector<EntityPtr> entities;
    {
      std::lock_guard<std::mutex> lock(shard.mutex);
      for (const auto& entry : shard.entities) {
        entities.push_back(entry.second);
      }
    }
    std::for_each(entities.begin(), entities.end(), visit);
  }
}

size_t EntityTable::size() {
  size_t count = 0;
  for (Shard& shard : shards_) {
    std::lock_guard<std::mutex> lock(shard.mutex);
    count += shard.entities.size();
  }
  return count;
}

void EntityTable::sweep(Shard& shard, std::vector<EntityPtr>& dead) {
  if (++shard.added < kSweepEvery) {
    return;
  }
  shard.added = 0;
  for (auto at = shard.entities.begin(); at != shard.entities.end();) {
    if (at->second->gone() && !at->second->used_by_ops()) {
      dead.push_back(std::move(at->second));
      at = shard.entities.erase(at);
    } else {
      ++at;
    }
  }
  const auto idle =
      std::partition(shard.retired.begin(), shard.retired.end(), [](const EntityPtr& entity) {
        return entity->used_by_ops();
      });
  std::move(idle, shard.retired.end(), std::back_inserter(dead));
  shard.retired.erase(idle, shard.retired.end());
}

} // namespace torch_lms
