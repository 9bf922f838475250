#pragma once

#include <atomic>
#include <cstddef>
#include <deque>
#include <memory>
#include <mutex>

#include <entity/EntityStorageImpl.h>

namespace torch_lms {

/// Page-ins whose copies may still be under way although their storages hold device
/// memory already: only the stream that needed the bytes waits for the copy. Ops on other
/// streams have to look such a storage up, even while nothing is paged out any more.
///
/// Thread-safe.
class Arrivals {
 public:
  /// Around whatever may page an entity in: the arrival is known before the storage holds
  /// device memory.
  class Scope {
   public:
    Scope(Arrivals& arrivals, EntityStorageImpl& entity);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    Arrivals& arrivals_;
    EntityStorageImpl& entity_;
  };

  /// Whether there are any. Cheap.
  bool any() const noexcept {
    return count_.load(std::memory_order_acquire) != 0;
  }

  /// Forgets those that are over. Does not wait, not for another thread either.
  void settle() noexcept;

  /// Waits for the copies. Throws TransferFailed if the device is in error.
  void wait();

 private:
  std::atomic<size_t> count_{0}; // open scopes and copies
  std::mutex mutex_;
  std::deque<FencePtr> copies_;
};

} // namespace torch_lms
