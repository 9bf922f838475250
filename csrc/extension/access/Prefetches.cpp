#include <extension/access/Prefetches.h>

#include <algorithm>
#include <cstdint>
#include <utility>

namespace torch_lms {
namespace {

constexpr size_t kMostAtOnce = 32; // are looked at before an op
constexpr size_t kOneMissedOf = 4; // bytes; see Note [A plan's room]

/// What is in use then, with those that it passes.
size_t bytes_with(const EntityPtr& entity, size_t passed_bytes) {
  return entity->device().use().allocated_bytes + passed_bytes + entity->nbytes();
}

} // namespace

void Prefetches::set_limit(size_t limit_bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  limit_bytes_ = limit_bytes;
}

void Prefetches::trust() {
  std::lock_guard<std::mutex> lock(mutex_);
  trusted_ = true;
}

void Prefetches::end_cycle() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (kOneMissedOf * missed_bytes_ > asked_bytes_) {
    trusted_ = false;
  }
  asked_bytes_ = missed_bytes_ = 0;
}

void Prefetches::add(EntityPtr entity) {
  std::lock_guard<std::mutex> lock(mutex_);
  asked_bytes_ += entity->nbytes();
  entities_.push_back(std::move(entity));
  any_.store(true, std::memory_order_relaxed);
}

void Prefetches::clear() {
  std::deque<EntityPtr> entities; // destroyed after unlocking
  EntityPtr held_back;
  std::lock_guard<std::mutex> lock(mutex_);
  entities.swap(entities_);
  held_back.swap(held_back_);
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
    if (state == EntityState::kOutQueued || state == EntityState::kPagingOut) {
      continue; // it is in use, and comes in when it has left
    }
    if (state != EntityState::kPagedOut || entity->gone()) {
      note_settled(entity, !entity->gone());
      settled.push_back(entity);
    } else if (
        const size_t used_bytes = bytes_with(entity, passed_bytes);
        used_bytes > std::min(limit_bytes, entity->device().limit_bytes())) {
      if (used_bytes <= entity->device().limit_bytes()) {
        note_held_back(entity);
      }
      break;
    } else if (entity->nbytes() < refused_bytes && pager_.requests().prefetch_ahead(entity, 0)) {
      note_settled(entity, false);
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
  *limit_bytes = trusted_ ? limit_bytes_ : SIZE_MAX;
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

void Prefetches::note_held_back(const EntityPtr& entity) {
  std::lock_guard<std::mutex> lock(mutex_);
  held_back_ = entity;
}

/// `missed`: it has come with its op, before it could be begun here.
void Prefetches::note_settled(const EntityPtr& entity, bool missed) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (held_back_ == entity) {
    missed_bytes_ += missed ? entity->nbytes() : 0;
    held_back_ = nullptr;
  }
}

} // namespace torch_lms
