#include <extension/transfer/Requests.h>

#include <utility>

#include <ATen/record_function.h>
#include <c10/util/Exception.h>
#include <entity/Error.h>

#include <extension/base/ForeignCall.h>
#include <extension/base/ThreadContext.h>
#include <extension/base/UnreadableMemory.h>
#include <extension/transfer/PageoutBatch.h>

namespace torch_lms {

bool Requests::drop_unwritten(const EntityPtr& entity) {
  std::unique_ptr<DeviceBlock> garbage; // the device's memory goes back here
  if (!entity->drop_unwritten(&garbage)) {
    return false;
  }
  entity->device().keep_block_for_streams(garbage->data());
  state_.stats.dropped_bytes.fetch_add(
      static_cast<int64_t>(entity->nbytes()), std::memory_order_relaxed);
  state_.whereabouts.left_device(entity);
  return true;
}

bool Requests::drop(const EntityPtr& entity, const std::shared_ptr<Recipe>& recipe) {
  const ActionTimes::Timer timer(state_.action_times, Action::kRecompute); // a part of it
  std::unique_ptr<DeviceBlock> garbage; // the device's memory goes back here
  if (!entity->drop(recipe, unreadable_memory(), &garbage)) {
    return false;
  }
  entity->device().keep_block_for_streams(garbage->data());
  state_.stats.recomputable_bytes.fetch_add(
      static_cast<int64_t>(entity->nbytes()), std::memory_order_relaxed);
  state_.whereabouts.left_device(entity);
  return true;
}

bool Requests::relocate(const EntityPtr& entity, const std::function<bool(const void*)>& suits) {
  if (in_foreign_call()) { // It may hold the address.
    return false;
  }
  try {
    const PrefetchAllocations scope(/*contiguous_reserve_bytes=*/0);
    return entity->relocate(suits);
  } catch (const NoRoom&) {
  } catch (const c10::OutOfMemoryError&) {
  }
  return false;
}

bool Requests::evict(const EntityPtr& entity) {
  if (entity->keeps_copy() && !in_foreign_call() && drop_unwritten(entity)) {
    return true;
  }
  ActionTimes::Timer timer(state_.action_times, Action::kPageout);
  PageoutBatch batch(state_.out);
  try {
    if (!batch.add(entity)) {
      return false;
    }
    batch.submit();
  } catch (const Error&) { // Somebody is waiting for the queue: not now.
    return false;
  }
  if (batch.count() == 0) {
    return false;
  }
  timer.count();
  return true;
}

bool Requests::prefetch(const c10::Storage& storage) {
  const EntityPtr entity = state_.table.find(*storage.unsafeGetStorageImpl());
  if (entity == nullptr) {
    return false;
  }
  if (is_leaving(entity->state())) {
    call_off_pageout(entity); // The cheapest page-in is not to leave.
    return true;
  }
  return enqueue_prefetch(entity);
}

bool Requests::prefetch_ahead(const EntityPtr& entity, size_t contiguous_reserve_bytes) {
  if (!entity->backend()->copies_asynchronously()) {
    return enqueue_prefetch(entity);
  }
  if (!entity->request_pagein()) {
    return false;
  }
  RECORD_USER_SCOPE("torch_lms::prefetch");
  ActionTimes::Timer timer(state_.action_times, Action::kPagein);
  try {
    const PrefetchAllocations scope(contiguous_reserve_bytes);
    auto in = entity->begin_pagein();
    if (in != nullptr) {
      timer.count();
      FencePtr copy = in->fence;
      state_.arrivals.add(entity, std::move(in), std::move(copy));
      state_.stats.prefetches.fetch_add(1, std::memory_order_relaxed);
      return true;
    }
  } catch (const NoRoom&) { // A hint that cannot be followed is no failure.
  } catch (const c10::OutOfMemoryError&) {
    state_.stats.pagein_failures.fetch_add(1, std::memory_order_relaxed);
  }
  state_.whereabouts.stays_out(entity);
  return false;
}

bool Requests::cancel_last_prefetch() {
  const EntityPtr entity = state_.arrivals.cancel_last();
  if (entity == nullptr) {
    return false;
  }
  state_.whereabouts.stays_out(entity);
  return true;
}

bool Requests::enqueue_prefetch(const EntityPtr& entity) {
  if (!entity->request_pagein()) {
    return false;
  }
  RECORD_USER_SCOPE("torch_lms::prefetch");
  state_.stats.prefetches.fetch_add(1, std::memory_order_relaxed);
  try {
    state_.in.enqueue(entity);
  } catch (const Error&) {
    if (entity->cancel_pagein()) { // Somebody is waiting for the queue: not now.
      state_.whereabouts.stays_out(entity);
    }
    return false;
  }
  return true;
}

size_t Requests::cancel_prefetches() {
  size_t nbytes = 0;
  while (const auto queued = state_.in.dequeue()) {
    if (queued->cancel_pagein()) {
      nbytes += queued->nbytes();
      state_.whereabouts.stays_out(entity_of(queued));
    }
  }
  return nbytes;
}

void Requests::call_off_pageout(const EntityPtr& entity) {
  AccessResult result = AccessResult::kResident;
  if (is_leaving(entity->state()) && entity->touch(&result)) {
    state_.whereabouts.came(entity, result);
  }
}

} // namespace torch_lms
