#pragma once

#include <cstddef>
#include <functional>
#include <memory>

#include <c10/core/Storage.h>

#include <extension/transfer/PagerState.h>

namespace torch_lms {

/// What is asked to move, and what is called off.
///
/// Thread-safe: every method may be called from any thread, with and without the GIL. They block on
/// nothing but mutexes.
class Requests {
 public:
  explicit Requests(PagerState& state) : state_(state) {}

  /// Moves a resident entity's bytes to another block of its device, in order with what the calling
  /// thread submits. False if that cannot be now, or no block was free whose address `suits`.
  bool relocate(const EntityPtr& entity, const std::function<bool(const void*)>& suits);

  /// Begins a page-out, or drops an unwritten storage's block at once. Returns false if the
  /// entity is in use or not resident. For several see `PageoutBatch`.
  bool evict(const EntityPtr& entity);

  /// Only the latter: RESIDENT -> PAGED_OUT without a copy. Not inside a foreign call.
  bool drop_unwritten(const EntityPtr& entity);

  /// RESIDENT -> DROPPED. Returns false if it stays. Not inside a foreign call.
  bool drop(const EntityPtr& entity, const std::shared_ptr<Recipe>& recipe);

  /// Enqueues a page-in. Returns false where there is nothing to do.
  bool prefetch(const c10::Storage& storage);

  /// Starts a prefetch that the policy has chosen: on the calling thread where
  /// copies are asynchronous (its place among the ops decides what it waits for), in
  /// the queue otherwise. Returns false if it could not be started.
  bool prefetch_ahead(const EntityPtr& entity, size_t contiguous_reserve_bytes);

  /// Calls off the latest prefetch that nobody has used yet; its memory is free at once
  /// and nothing has to be copied out. Returns false if there is none.
  bool cancel_last_prefetch();

  /// Calls off prefetches that have not begun; returns their bytes.
  size_t cancel_prefetches();

  /// The calling thread has pinned an entity: it stays, if it was on its way out.
  void call_off_pageout(const EntityPtr& entity);

 private:
  bool enqueue_prefetch(const EntityPtr& entity);

  PagerState& state_;
};

} // namespace torch_lms
