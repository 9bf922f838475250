#include <extension/access/Prefetches.h>

#include <utility>

namespace torch_lms {

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
  for (;;) {
    EntityPtr entity;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (entities_.empty()) {
        any_.store(false, std::memory_order_relaxed);
        return;
      }
      entity = entities_.front();
    }
    if (entity->state() == EntityState::kPagedOut && !entity->gone() &&
        !pager_.requests().prefetch_ahead(entity, 0)) {
      return; // no room yet
    }
    std::lock_guard<std::mutex> lock(mutex_);
    if (!entities_.empty() && entities_.front() == entity) {
      entities_.pop_front();
    }
  }
}

} // namespace torch_lms
