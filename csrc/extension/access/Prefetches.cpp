#include <extension/access/Prefetches.h>

#include <algorithm>
#include <cstdint>
#include <utility>

namespace torch_lms {
namespace {

constexpr size_t kMostAtOnce = 32; // are looked at before an op

/// What is in use then, with those that it passes.
size_t bytes_with(const EntityPtr& entity, size_t passed_bytes) {
  return entity->device().use().allocated_bytes + passed_bytes + entity->nbytes();
}

} // namespace

void Prefetches::set_limit(size_t limit_bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  limit_bytes_ = limit_bytes;
}

bool Prefetches::end_cycle() {
  std::lock_guard<std::mutex> lock(mutex_);
  return std::exchange(held_back_, false);
}

void Prefetches::add(EntityPtr entity) {
  std::lock_guard<std::mutex> lock(mutex_);
  entities_.push_back(std::move(entity));
  any_.store(true, std::memory_order_relaxed);
}

void Prefetches::clear() {
  std::deque<EntityPtr> entities; // destroyed after unlocking
  std::lock_guard<std::mutex> lock(mutex_);
  entities.swap(entities_);
  any_.store(false, std::memory_order_relaxed);
}

void Prefetches::begin() {
  size_t limit_bytes = 0;
  const std::vector<EntityPtr> entities = first(&limit_bytes);
  std::vector<EntityPtr> settled;
  size_t refused_bytes = SIZE_MAX; // the least that has found no piece
  size_t passed_bytes = 0;
  for (const EntityPtr& entity : entities) {
    const EntityState state = entity->state();
    if (is_leaving(state)) {
      continue; // it is in use, and comes in when it has left
    }
    if (state != EntityState::kPagedOut || entity->gone()) {
      settled.push_back(entity);
    } else if (
        const size_t used_bytes = bytes_with(entity, passed_bytes);
        used_bytes > std::min(limit_bytes, entity->device().limit_bytes())) {
      std::lock_guard<std::mutex> lock(mutex_);
      held_back_ = held_back_ || used_bytes <= entity->device().limit_bytes();
      break;
    } else if (entity->nbytes() < refused_bytes && pager_.requests().prefetch_ahead(entity, 0)) {
      settled.push_back(entity);
    } else { // see Note [Past what finds no piece]
      refused_bytes = std::min(refused_bytes, entity->nbytes());
      passed_bytes += entity->nbytes();
    }
  }
  remove(settled);
}

std::vector<EntityPtr> Prefetches::first(size_t* limit_bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  *limit_bytes = limit_bytes_;
  const size_t count = std::min(kMostAtOnce, entities_.size());
  return {entities_.begin(), entities_.begin() + static_cast<std::ptrdiff_t>(count)};
}

void Prefetches::remove(const std::vector<EntityPtr>& settled) {
  std::vector<EntityPtr> removed; // destroyed after unlocking
  std::lock_guard<std::mutex> lock(mutex_);
  for (const EntityPtr& entity : settled) {
    const auto found = std::find(entities_.begin(), entities_.end(), entity);
    if (found != entities_.end()) {
      removed.push_back(std::move(*found));
      entities_.erase(found);
    }
  }
  any_.store(!entities_.empty(), std::memory_order_relaxed);
}

} // namespace torch_lms
