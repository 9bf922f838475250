#include <extension/transfer/Pager.h>

#include <algorithm>
#include <chrono>
#include <iterator>
#include <string>
#include <thread>
#include <utility>

#include <ATen/record_function.h>
#include <c10/util/Exception.h>
#include <entity/Error.h>

#include <extension/base/Compat.h>
#include <extension/base/ErrorText.h>
#include <extension/base/ForeignCall.h>
#include <extension/base/Fork.h>
#include <extension/base/Interpreter.h>
#include <extension/base/ThreadContext.h>
#include <extension/base/UnreadableMemory.h>
#include <extension/transfer/PageoutBatch.h>

#ifdef TORCH_LMS_WITH_CUDA
#include <cuda_runtime_api.h>
#endif

namespace torch_lms {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kCommitPatience = std::chrono::seconds(60);
constexpr int64_t kTurn_us = 200;
constexpr auto kMomentForOps = std::chrono::microseconds(50);

void begin_worker() {
  this_thread().for_prefetch = true;
#ifdef TORCH_LMS_WITH_CUDA
  // A capture in another thread must not forbid this one's calls; they touch only
  // streams that are never captured.
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  cudaThreadExchangeStreamCaptureMode(&mode);
#endif
}

} // namespace

Pager::Pager(Devices& devices)
    : devices_(devices),
      out_(TransferDirection::kOut, size_t{1} << 30, &begin_worker),
      in_(TransferDirection::kIn, size_t{1} << 30, &begin_worker) {}

// --- entities -------------------------------------------------------------------

EntityPtr Pager::make_entity(c10::StorageImpl& storage, bool by_hand) {
  Device* device = has_bytes(storage) ? devices_.find(storage.device()) : nullptr;
  if (why_not_movable(storage, device) != nullptr) {
    return nullptr;
  }
  reclaim_from(*device->pool());
  return std::make_shared<Entity>(
      std::make_unique<TorchStorageBinding>(&storage, *device, *this),
      storage,
      *device,
      storage.nbytes(),
      by_hand ? OpClock::get().tick() : observed_since_.load(std::memory_order_acquire));
}

EntityPtr Pager::find_or_track(c10::StorageImpl& storage, bool by_hand) {
  if (EntityPtr entity = table_.find(storage)) {
    return entity;
  }
  if (by_hand) {
    look_for_all(); // before anybody can miss it
  }
  EntityPtr made;
  EntityPtr entity =
      table_.find_or_make(storage, [&] { return made = make_entity(storage, by_hand); });
  note_made(made);
  return entity;
}

EntityPtr Pager::fix(c10::StorageImpl& storage) {
  look_for_all();
  EntityPtr made;
  EntityPtr entity =
      table_.fix(storage, [&] { return made = make_entity(storage, /*by_hand=*/true); });
  note_made(made);
  return entity;
}

void Pager::note_made(const EntityPtr& entity) {
  if (entity != nullptr) {
    if (entity->device().capturing()) {
      entity->fix(); // Its address is part of the graph: it never moves.
    }
    listener_->became_resident(entity);
  }
}

// --- requests -----------------------------------------------------------------

bool Pager::drop_unwritten(const EntityPtr& entity) {
  std::unique_ptr<DeviceBlock> garbage; // the device's memory goes back here
  if (!entity->drop_unwritten(&garbage)) {
    return false;
  }
  entity->device().keep_block_for_streams(garbage->data());
  stats_.dropped_bytes.fetch_add(static_cast<int64_t>(entity->nbytes()), std::memory_order_relaxed);
  left_device(entity);
  return true;
}

bool Pager::drop(const EntityPtr& entity, const std::shared_ptr<Recipe>& recipe) {
  const ActionTimes::Timer timer(action_times_, Action::kRecompute); // a part of it
  std::unique_ptr<DeviceBlock> garbage; // the device's memory goes back here
  if (!entity->drop(recipe, unreadable_memory(), &garbage)) {
    return false;
  }
  entity->device().keep_block_for_streams(garbage->data());
  stats_.recomputable_bytes.fetch_add(
      static_cast<int64_t>(entity->nbytes()), std::memory_order_relaxed);
  left_device(entity);
  return true;
}

bool Pager::relocate(const EntityPtr& entity, const std::function<bool(const void*)>& suits) {
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

bool Pager::evict(const EntityPtr& entity) {
  if (entity->keeps_copy() && !in_foreign_call() && drop_unwritten(entity)) {
    return true;
  }
  ActionTimes::Timer timer(action_times_, Action::kPageout);
  PageoutBatch batch(*this);
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

void Pager::take_back(const EntityPtr& entity) {
  AccessResult ignored = AccessResult::kResident;
  entity->touch(&ignored);
}

bool Pager::prefetch(const c10::Storage& storage) {
  const EntityPtr entity = find(*storage.unsafeGetStorageImpl());
  if (entity == nullptr) {
    return false;
  }
  const EntityState state = entity->state();
  if (state == EntityState::kOutQueued || state == EntityState::kPagingOut) {
    call_off_pageout(entity); // The cheapest page-in is not to leave.
    return true;
  }
  return enqueue_prefetch(entity);
}

bool Pager::prefetch_ahead(const EntityPtr& entity, size_t contiguous_reserve_bytes) {
  if (!entity->backend()->copies_asynchronously()) {
    return enqueue_prefetch(entity);
  }
  if (!entity->request_pagein()) {
    return false;
  }
  RECORD_USER_SCOPE("torch_lms::prefetch");
  ActionTimes::Timer timer(action_times_, Action::kPagein);
  try {
    const PrefetchAllocations scope(contiguous_reserve_bytes);
    auto in = entity->begin_pagein();
    if (in != nullptr) {
      timer.count();
      FencePtr copy = in->fence;
      arrivals_.add(entity, std::move(in), std::move(copy));
      stats_.prefetches.fetch_add(1, std::memory_order_relaxed);
      return true;
    }
  } catch (const NoRoom&) { // A hint that cannot be followed is no failure.
  } catch (const c10::OutOfMemoryError&) {
    stats_.pagein_failures.fetch_add(1, std::memory_order_relaxed);
  }
  listener_->was_paged_out(entity);
  return false;
}

bool Pager::cancel_last_prefetch() {
  const EntityPtr entity = arrivals_.cancel_last();
  if (entity == nullptr) {
    return false;
  }
  listener_->was_paged_out(entity);
  return true;
}

bool Pager::enqueue_prefetch(const EntityPtr& entity) {
  if (!entity->request_pagein()) {
    return false;
  }
  RECORD_USER_SCOPE("torch_lms::prefetch");
  stats_.prefetches.fetch_add(1, std::memory_order_relaxed);
  try {
    in_.enqueue(entity);
  } catch (const Error&) {
    entity->cancel_pagein(); // Somebody is waiting for the queue: not now.
    return false;
  }
  return true;
}

size_t Pager::cancel_prefetches() {
  size_t nbytes = 0;
  while (const auto queued = in_.dequeue()) {
    if (queued->cancel_pagein()) {
      nbytes += queued->nbytes();
      listener_->was_paged_out(entity_of(queued));
    }
  }
  return nbytes;
}

// --- use ------------------------------------------------------------------------

void Pager::left_device(const EntityPtr& entity) {
  paged_out_bytes_.fetch_add(static_cast<int64_t>(entity->nbytes()), std::memory_order_relaxed);
  paged_out_storages_.fetch_add(1, std::memory_order_relaxed);
  listener_->was_paged_out(entity);
}

void Pager::left_host(const EntityStorageImpl& entity) noexcept {
  paged_out_bytes_.fetch_sub(static_cast<int64_t>(entity.nbytes()), std::memory_order_relaxed);
  paged_out_storages_.fetch_sub(1, std::memory_order_relaxed);
}

/// Other streams have to wait for it.
void Pager::note_arrival(const EntityPtr& entity) {
  if (FencePtr copy = entity->arrival()) {
    try {
      arrivals_.add(entity, nullptr, copy);
    } catch (const std::bad_alloc&) {
      copy->wait();
    }
  }
}

void Pager::count(const EntityPtr& entity, AccessResult result) {
  switch (result) {
    case AccessResult::kResident:
    case AccessResult::kServed:
      return;
    case AccessResult::kCancelledPageout:
      stats_.cancelled_pageouts.fetch_add(1, std::memory_order_relaxed);
      listener_->was_cancelled(entity);
      listener_->became_resident(entity);
      return;
    case AccessResult::kPagedIn:
      stats_.passive_pageins.fetch_add(1, std::memory_order_relaxed);
      break;
    case AccessResult::kPrefetched:
      stats_.prefetch_hits.fetch_add(1, std::memory_order_relaxed);
      break;
    case AccessResult::kRemade:
      stats_.recomputations.fetch_add(1, std::memory_order_relaxed);
      stats_.recomputed_bytes.fetch_add(
          static_cast<int64_t>(entity->nbytes()), std::memory_order_relaxed);
      left_host(*entity);
      note_arrival(entity);
      listener_->became_resident(entity);
      return;
  }
  stats_.pageins.fetch_add(1, std::memory_order_relaxed);
  stats_.pagein_bytes.fetch_add(static_cast<int64_t>(entity->nbytes()), std::memory_order_relaxed);
  left_host(*entity);
  note_arrival(entity);
  if (entity->keeps_copy()) {
    try {
      std::lock_guard<std::mutex> lock(kept_mutex_);
      kept_.push_back(entity);
      if (kept_.size() >= sweep_kept_at_) {
        kept_.erase(
            std::remove_if(
                kept_.begin(),
                kept_.end(),
                [](const std::weak_ptr<Entity>& weak) {
                  const EntityPtr known = weak.lock();
                  return known == nullptr || !known->keeps_copy();
                }),
            kept_.end());
        sweep_kept_at_ = std::max<size_t>(256, 2 * kept_.size());
      }
    } catch (const std::bad_alloc&) {
      entity->release_copy();
    }
  }
  listener_->became_resident(entity);
}

AccessResult Pager::access(const EntityPtr& entity) {
  const EntityState state = entity->state();
  if (state == EntityState::kResident) {
    return entity->access();
  }
  const WithoutGil no_gil; // another thread may be bringing it, and need the lock for that
  if (state == EntityState::kDropped) {
    RECORD_USER_SCOPE("torch_lms::recompute");
    bring_ingredients_(entity);
    return entity->access();
  }
  RECORD_USER_SCOPE("torch_lms::passive_pagein");
  return entity->access();
}

Place Pager::use(const EntityPtr& entity) {
  for (;;) {
    AccessResult result = AccessResult::kResident;
    try {
      result = access(entity);
    } catch (const std::exception& error) {
      stats_.pagein_failures.fetch_add(1, std::memory_order_relaxed);
      if (entity->serve()) {
        note_served(entity, text_of(error));
        return Place::kHost;
      }
      if (entity->state() == EntityState::kDropped) {
        entity->refuse(text_of(error));
        return Place::kNowhere;
      }
      continue; // another thread has brought it in meanwhile
    }
    if (result == AccessResult::kServed) {
      note_served(entity);
      return Place::kHost;
    }
    count(entity, result);
    return Place::kDevice;
  }
}

void Pager::note_served(const EntityPtr& entity, const std::string& why) {
  stats_.host_served.fetch_add(1, std::memory_order_relaxed);
  TORCH_WARN_ONCE(
      "torch_lms: no room on the device for a storage of ",
      entity->nbytes(),
      " bytes that an op uses; the op works on the host copy, which is right but slow. Raise "
      "the limit, or use smaller batches.",
      why.empty() ? why : " (" + why + ")",
      " Further cases are counted in torch_lms.stats().host_served.");
}

void Pager::call_off_pageout(const EntityPtr& entity) {
  const EntityState before = entity->state();
  AccessResult result = AccessResult::kResident;
  if ((before == EntityState::kOutQueued || before == EntityState::kPagingOut) &&
      entity->touch(&result)) {
    count(entity, result);
  }
}

void Pager::released(const std::shared_ptr<EntityStorageImpl>& entity) noexcept {
  left_host(*entity);
  if (const KeepAlive storage = entity->hold()) { // which has been given other memory
    compat::allow_access(*std::static_pointer_cast<c10::Storage>(storage)->unsafeGetStorageImpl());
  }
  entity->host_copy_released();
}

// --- copies that the host keeps ---------------------------------------------------

/// Gives one back: of a storage that has died, or where it is needed, the oldest.
bool Pager::reclaim_copy(HostPool::Urgency urgency) {
  for (;;) {
    EntityPtr chosen;
    {
      std::lock_guard<std::mutex> lock(kept_mutex_);
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

void Pager::release_copies_of_dead() {
  std::vector<EntityPtr> dead;
  {
    std::lock_guard<std::mutex> lock(kept_mutex_);
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

void Pager::keep_copies(bool keep) {
  keeps_copies_.store(keep);
  std::deque<std::weak_ptr<Entity>> kept;
  if (!keep) {
    std::lock_guard<std::mutex> lock(kept_mutex_);
    kept.swap(kept_);
  }
  for (const auto& weak : kept) {
    const EntityPtr entity = weak.lock();
    const KeepAlive keep_alive = entity != nullptr ? entity->hold() : nullptr;
    if (keep_alive != nullptr) {
      entity->pin();
      entity->stop_watching();
      entity->unpin();
    } else if (entity != nullptr) {
      entity->release_copy();
    }
  }
}

void Pager::reclaim_from(HostPool& pool) {
  std::lock_guard<std::mutex> lock(kept_mutex_);
  if (std::find(pools_.begin(), pools_.end(), &pool) == pools_.end()) {
    pools_.push_back(&pool);
    pool.set_reclaim([this](HostPool::Urgency urgency) { return reclaim_copy(urgency); });
  }
}

// --- commits ----------------------------------------------------------------------

CommitResult Pager::commit_pageout(FinishedTransfer& finished) {
  if (finished.out == nullptr || finished.out->host == nullptr) {
    return CommitResult::kDropped;
  }
  std::unique_ptr<DeviceBlock> garbage;
  try {
    const CommitResult result = finished.entity->commit_pageout(finished.out, &garbage);
    if (result == CommitResult::kCommitted) {
      const auto nbytes = static_cast<int64_t>(finished.entity->nbytes());
      stats_.pageouts.fetch_add(1, std::memory_order_relaxed);
      stats_.pageout_bytes.fetch_add(nbytes, std::memory_order_relaxed);
      left_device(entity_of(finished.entity));
    }
    return result;
  } catch (const std::bad_alloc&) { // for a few bytes: later, then
    return CommitResult::kInUse;
  }
}

void Pager::commit_pageouts(std::vector<KeepAlive>& dropped, const Device* allocating) {
  std::vector<FinishedTransfer> taken = out_.take_finished();
  std::vector<FinishedTransfer> later; // in use, or another device's
  try {
    later.reserve(taken.size());
    dropped.reserve(dropped.size() + taken.size());
  } catch (const std::bad_alloc&) { // for a few bytes: all of them later, then
    out_.return_finished(std::move(taken));
    return;
  }
  for (FinishedTransfer& finished : taken) {
    const bool others =
        allocating != nullptr && &entity_of(finished.entity)->device() != allocating;
    if (others || commit_pageout(finished) == CommitResult::kInUse) {
      later.push_back(std::move(finished));
      continue;
    }
    if (finished.out != nullptr) {
      dropped.push_back(std::move(finished.out->keep));
    }
    out_.retire(finished.entity->nbytes());
  }
  if (!later.empty()) {
    out_.return_finished(std::move(later));
  }
}

void Pager::commit_pageins() {
  for (FinishedTransfer& finished : in_.take_finished()) {
    try {
      if (finished.in != nullptr && finished.entity->commit_pagein(finished.in)) {
        count(entity_of(finished.entity), AccessResult::kPrefetched);
      }
    } catch (const std::bad_alloc&) { // for a few bytes: the next use commits it
    }
    in_.retire(finished.entity->nbytes());
  }
}

void Pager::commit_finished(const Device* allocating) {
  std::vector<KeepAlive> dropped;
  if (out_.has_finished() && !in_foreign_call()) {
    commit_pageouts(dropped, allocating);
  }
  if (allocating == nullptr && in_.has_finished()) {
    commit_pageins();
  }
  std::lock_guard<std::mutex> lock(dropped_mutex_);
  std::vector<KeepAlive>& to = allocating != nullptr ? dropped_ : dropped;
  std::vector<KeepAlive>& from = allocating != nullptr ? dropped : dropped_;
  std::move(from.begin(), from.end(), std::back_inserter(to));
  from.clear();
}

void Pager::settle_prefetches() {
  for (const auto& prefetch : arrivals_.take_prefetches()) {
    if (prefetch.first->commit_pagein(prefetch.second)) {
      count(prefetch.first, AccessResult::kPrefetched);
    }
  }
}

void Pager::wait_pageouts() {
  const uint64_t last = out_.pending_until();
  uint64_t seen = out_.progress();
  auto progressed = Clock::now();
  for (bool over = false; !over || out_.has_finished();) {
    over = out_.is_over(last);
    commit_finished(); // while the others are copied
    const uint64_t before = seen;
    if (!over) {
      seen = out_.wait_for_progress(seen, kTurn_us);
    } else if (out_.has_finished()) {
      std::this_thread::sleep_for(kMomentForOps); // an op uses it
    }
    if (seen != before || !(over || out_.waits_for_ops())) {
      progressed = Clock::now();
    } else if (Clock::now() - progressed > kCommitPatience) {
      throw TransferFailed(
          "expected running ops to let go of storages that are to be paged out, found one still "
          "running after 60 s on another thread; wait for that thread first");
    }
  }
  if (const std::exception_ptr error = out_.take_error()) {
    std::rethrow_exception(error);
  }
}

void Pager::wait_pageins() {
  settle_prefetches();
  uint64_t seen = in_.progress();
  for (const uint64_t last = in_.pending_until(); !in_.is_over(last);) {
    commit_finished(); // while the others are copied
    seen = in_.wait_for_progress(seen, kTurn_us);
  }
  arrivals_.wait();
  commit_finished();
  try {
    if (const std::exception_ptr error = in_.take_error()) {
      std::rethrow_exception(error);
    }
  } catch (const NoRoom&) {
    stats_.pagein_failures.fetch_add(1, std::memory_order_relaxed);
  } catch (const c10::OutOfMemoryError&) {
    stats_.pagein_failures.fetch_add(1, std::memory_order_relaxed);
  }
}

void Pager::make_dropped_again() {
  table_.for_each([&](const EntityPtr& entity) {
    const KeepAlive keep = entity->hold();
    if (keep != nullptr && entity->state() == EntityState::kDropped) {
      entity->pin();
      use(entity);
      entity->unpin();
    }
  });
}

void Pager::pagein_all() {
  std::exception_ptr failed;
  const auto deadline = Clock::now() + kCommitPatience;
  table_.for_each([&](const EntityPtr& entity) {
    const KeepAlive keep = entity->hold();
    try {
      while (keep != nullptr && entity->state() != EntityState::kResident) {
        const AccessResult result = access(entity);
        count(entity, result);
        if (result != AccessResult::kServed) {
          break;
        }
        entity->end_service(); // Ops of other threads use the host copy: until they end.
        if (Clock::now() > deadline) {
          throw TransferFailed(
              "expected running ops to let go of storages that are to be paged in, found one still "
              "running after 60 s on another thread; wait for that thread first");
        }
        std::this_thread::sleep_for(kMomentForOps);
      }
    } catch (...) {
      failed = std::current_exception();
    }
  });
  arrivals_.wait(); // Ops may not be observed from here on.
  commit_finished();
  if (failed != nullptr) {
    std::rethrow_exception(failed);
  }
}

} // namespace torch_lms
