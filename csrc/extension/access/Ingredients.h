#pragma once

#include <vector>

#include <c10/core/Storage.h>

#include <extension/access/KeptWatch.h>
#include <extension/transfer/Pager.h>

namespace torch_lms {

/// Storages whose bytes are on the device, and stay there while it lives.
///
/// Not thread-safe: an object of one call. `bring` waits as `Pager::use`; the rest blocks on
/// nothing but mutexes.
class Ingredients {
 public:
  explicit Ingredients(Pager& pager) : pager_(pager) {}
  ~Ingredients() {
    kept_watch_.end();
    for (const EntityPtr& entity : served_) {
      entity->end_service();
    }
    for (const EntityPtr& entity : pinned_) {
      entity->unpin();
    }
  }
  Ingredients(const Ingredients&) = delete;
  Ingredients& operator=(const Ingredients&) = delete;

  /// Throws if it has been dropped and cannot be made again: what that says.
  void bring(const EntityPtr& entity) {
    pinned_.reserve(pinned_.size() + 1);
    served_.reserve(served_.size() + 1);
    storages_.push_back(entity->hold());
    if (storages_.back() == nullptr) {
      return; // what it was for has been made, or is gone, too
    }
    entity->pin(); // before it comes in: making room for it must not push it out
    pinned_.push_back(entity);
    const Place place = pager_.use(entity);
    if (place == Place::kHost) {
      served_.push_back(entity);
    } else if (place == Place::kNowhere) {
      std::static_pointer_cast<c10::Storage>(storages_.back())
          ->unsafeGetStorageImpl()
          ->throw_data_ptr_access_error(); // it says why
    }
    kept_watch_.add(*entity);
  }

 private:
  Pager& pager_;
  std::vector<KeepAlive> storages_;
  std::vector<EntityPtr> pinned_;
  std::vector<EntityPtr> served_;
  KeptWatch kept_watch_;
};

} // namespace torch_lms
