#pragma once

#include <atomic>
#include <cstddef>
#include <deque>
#include <list>
#include <mutex>

#include <extension/transfer/Entity.h>

namespace torch_lms {

/// Page-ins whose copies may still be under way, of two kinds: prefetches that the thread which
/// asked for them began itself (where copies are asynchronous, their place among the ops decides
/// what they wait for) and that nobody may have used yet; and storages that hold device memory
/// already, for whose bytes only the stream that needed them waits. Ops have to be observed while
/// there are any.
///
/// Thread-safe: every method may be called from any thread, with and without the GIL. Only `wait`
/// blocks for longer than a lookup: for copies.
class Arrivals {
 public:
  /// Of either kind: `in` is null where the page-in has been committed.
  void add(EntityPtr entity, std::shared_ptr<PageinTransfer> in, FencePtr copy);

  bool any() const noexcept {
    return count_.load(std::memory_order_acquire) != 0;
  }

  /// Calls the latest prefetch off that nobody has used yet, and returns its entity; its memory
  /// is free then. Null if there is none.
  EntityPtr cancel_last();

  /// Takes out the prefetches, those that have been used included.
  std::deque<std::pair<EntityPtr, std::shared_ptr<PageinTransfer>>> take_prefetches();

  /// Forgets what is over. Does not wait, not for another thread either.
  void settle() noexcept;

  /// Waits for the copies. Throws TransferFailed if the device is in error.
  void wait();

 private:
  struct Arrival {
    EntityPtr entity;
    std::shared_ptr<PageinTransfer> in;
    FencePtr copy;

    bool over() const {
      return copy == nullptr || copy->done();
    }
  };

  std::mutex mutex_;
  std::list<Arrival> arrivals_; // `settle` takes no memory
  std::atomic<size_t> count_{0};
};

} // namespace torch_lms
