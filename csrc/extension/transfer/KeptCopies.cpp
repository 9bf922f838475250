#include <extension/transfer/KeptCopies.h>

#include <algorithm>
#include <new>
#include <utility>

namespace torch_lms {

/// Whose last owner may be this one, so no lock is held.
void KeptCopies::end_keeping(const EntityPtr entity) {
  if (const KeepAlive storage = entity->try_to_hold()) {
    entity->end_keeping([this] { return keeps(); });
  } else { // it has died, or memory is short
    entity->release_copy();
  }
}

void KeptCopies::add(const EntityPtr& entity) {
  try {
    std::unique_lock<std::mutex> lock(mutex_);
    if (!keeps()) { // See Note [Copies that come while the mode ends].
      lock.unlock();
      end_keeping(entity);
      return;
    }
    kept_.push_back(entity);
    if (kept_.size() >= sweep_at_) {
      kept_.erase(
          std::remove_if(
              kept_.begin(),
              kept_.end(),
              [](const std::weak_ptr<Entity>& weak) {
                const EntityPtr known = weak.lock();
                return known == nullptr || !known->keeps_copy();
              }),
          kept_.end());
      sweep_at_ = std::max<size_t>(256, 2 * kept_.size());
    }
  } catch (const std::bad_alloc&) {
    entity->release_copy();
  }
}

/// Gives one back: of a storage that has died, or where it is needed, the oldest.
bool KeptCopies::reclaim(HostPool::Urgency urgency) {
  for (;;) {
    EntityPtr chosen;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      auto at = kept_.begin();
      for (; at != kept_.end(); ++at) {
        chosen = at->lock();
        if (chosen == nullptr || !chosen->keeps_copy() || chosen->gone() ||
            urgency == HostPool::Urgency::kNeeded) {
          break;
        }
      }
      if (at == kept_.end()) {
        return false;
      }
      kept_.erase(at);
    }
    if (chosen != nullptr && chosen->release_copy()) {
      return true;
    }
  }
}

void KeptCopies::release_of_dead() {
  std::vector<EntityPtr> dead;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto stays = [&](const std::weak_ptr<Entity>& weak) {
      EntityPtr entity = weak.lock();
      const bool alive = entity != nullptr && !entity->gone();
      if (entity != nullptr && !alive) {
        dead.push_back(std::move(entity));
      }
      return alive;
    };
    kept_.erase(std::stable_partition(kept_.begin(), kept_.end(), stays), kept_.end());
  }
  for (const EntityPtr& entity : dead) {
    entity->release_copy();
  }
}

void KeptCopies::keep(bool keep) {
  std::unique_lock<std::mutex> lock(mutex_);
  keeps_.store(keep, std::memory_order_relaxed);
  while (!keeps() && !kept_.empty()) { // one by one, which takes no memory
    EntityPtr entity = kept_.front().lock();
    kept_.pop_front();
    lock.unlock();
    if (entity != nullptr) {
      entity->release_copy();
      entity = nullptr; // the last owner may be this one
    }
    lock.lock();
  }
}

void KeptCopies::unwatch_all() {
  try {
    entities_.for_each([this](const EntityPtr& entity) {
      if (!entity->keeps_copy()) { // else it is about to be added
        end_keeping(entity);
      }
    });
  } catch (const std::bad_alloc&) { // their blocks stay watched
  }
}

void KeptCopies::lend_to(HostPool& pool) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (std::find(pools_.begin(), pools_.end(), &pool) == pools_.end()) {
    pools_.push_back(&pool);
    pool.set_reclaim([this](HostPool::Urgency urgency) { return reclaim(urgency); });
  }
}

} // namespace torch_lms
