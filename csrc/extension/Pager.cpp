#include <extension/Pager.h>

#include <algorithm>
#include <chrono>
#include <string>
#include <thread>
#include <utility>

#include <ATen/record_function.h>
#include <c10/util/Exception.h>
#include <entity/CpuEntityStorageImpl.h>
#include <entity/CudaEntityStorageImpl.h>
#include <entity/Error.h>

#include <extension/ErrorText.h>
#include <extension/Fork.h>
#include <extension/MemoryPressure.h>
#include <extension/OpObserver.h>
#include <extension/TorchStorageBinding.h>

namespace torch_lms {
namespace {

constexpr auto kCommitPatience = std::chrono::seconds(60);
constexpr int64_t kTurn_us = 200;

EntityPtr make_entity(c10::StorageImpl& storage, Device& device, bool fresh) {
  auto binding = std::make_unique<TorchStorageBinding>(&storage, device);
  const uint64_t first_seen = fresh ? 0 : OpClock::get().tick();
  const size_t nbytes = storage.nbytes();
  if (device.device().is_cuda()) {
    return std::make_shared<CudaEntityStorageImpl>(
        std::move(binding), device.backend(), nbytes, first_seen);
  }
  return std::make_shared<CpuEntityStorageImpl>(
      std::move(binding), device.backend(), nbytes, first_seen);
}

void begin_worker() {
  allocate_for_prefetches();
  prepare_worker();
}

} // namespace

Pager& Pager::get() {
  static auto* pager = new Pager();
  return *pager;
}

Pager::Pager()
    : out_(TransferDirection::kOut, size_t{1} << 30, &begin_worker),
      in_(TransferDirection::kIn, size_t{1} << 30, &begin_worker) {
  watch_forks();
}

// --- requests -----------------------------------------------------------------

EntityPtr Pager::find(c10::StorageImpl& storage) {
  if (HostMark* mark = host_mark(storage)) {
    return mark->entity;
  }
  return table_.find(&storage);
}

EntityPtr Pager::find_or_track(c10::StorageImpl& storage, bool fresh) {
  if (HostMark* mark = host_mark(storage)) {
    return mark->entity;
  }
  if (EntityPtr entity = table_.find(&storage)) {
    return entity;
  }
  Device* device = find_device(storage.device());
  if (why_not_movable(storage, device) != nullptr) {
    return nullptr;
  }
  const bool stays = device->capturing();
  EntityPtr entity =
      table_.find_or_make(&storage, [&] { return make_entity(storage, *device, fresh); });
  if (stays) {
    entity->pin(); // Its address is part of the graph: it never moves.
  }
  MemoryPressure::get().record_use(entity);
  MemoryPressure::get().note_resident(entity);
  return entity;
}

bool Pager::evict(const EntityPtr& entity) {
  if (!entity->request_pageout()) {
    return false;
  }
  RECORD_USER_SCOPE("torch_lms::pageout");
  try {
    out_.enqueue(entity);
  } catch (const Error&) {
    take_back(entity); // Somebody is waiting for the queue: not now.
    return false;
  }
  return true;
}

void Pager::take_back(const EntityPtr& entity) {
  AccessResult ignored = AccessResult::kResident;
  entity->touch(&ignored);
}

bool Pager::prefetch(const c10::Storage& storage) {
  HostMark* mark = host_mark(*storage.unsafeGetStorageImpl());
  if (mark != nullptr) {
    return enqueue_prefetch(mark->entity);
  }
  // On its way out: the cheapest page-in is not to leave.
  const EntityPtr entity = table_.find(storage.unsafeGetStorageImpl());
  return entity != nullptr && entity->state() != EntityState::kResident && use(entity);
}

bool Pager::prefetch_ahead(const EntityPtr& entity, size_t contiguous_reserve_bytes) {
  if (!entity->backend()->copies_asynchronously()) {
    return enqueue_prefetch(entity);
  }
  try {
    if (!direct_.begin(entity, contiguous_reserve_bytes)) {
      return false;
    }
    stats_.prefetches.fetch_add(1, std::memory_order_relaxed);
    return true;
  } catch (const NoRoom&) { // A hint that cannot be followed is no failure.
  } catch (const c10::OutOfMemoryError&) {
    stats_.pagein_failures.fetch_add(1, std::memory_order_relaxed);
  }
  MemoryPressure::get().note_paged_out(entity);
  return false;
}

void Pager::settle_prefetches() {
  for (const FinishedTransfer& transfer : direct_.take_all()) {
    commit_pagein(transfer);
  }
}

bool Pager::cancel_last_prefetch() {
  const EntityPtr entity = direct_.cancel_last();
  if (entity == nullptr) {
    return false;
  }
  MemoryPressure::get().note_paged_out(entity);
  return true;
}

bool Pager::commit_pagein(const FinishedTransfer& finished) {
  if (finished.in == nullptr || !finished.entity->commit_pagein(finished.in)) {
    return false;
  }
  count(finished.entity, AccessResult::kPrefetched);
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
  while (EntityPtr entity = in_.dequeue()) {
    if (entity->cancel_pagein()) {
      nbytes += entity->nbytes();
      MemoryPressure::get().note_paged_out(entity);
    }
  }
  return nbytes;
}

// --- use ------------------------------------------------------------------------

void Pager::left_host(const EntityStorageImpl& entity) noexcept {
  paged_out_bytes_.fetch_sub(static_cast<int64_t>(entity.nbytes()), std::memory_order_relaxed);
  paged_out_storages_.fetch_sub(1, std::memory_order_relaxed);
}

void Pager::count(const EntityPtr& entity, AccessResult result) {
  const auto nbytes = static_cast<int64_t>(entity->nbytes());
  switch (result) {
    case AccessResult::kResident:
      return;
    case AccessResult::kCancelledPageout:
      stats_.cancelled_pageouts.fetch_add(1, std::memory_order_relaxed);
      MemoryPressure::get().note_cancelled(entity);
      break;
    case AccessResult::kPagedIn:
      stats_.passive_pageins.fetch_add(1, std::memory_order_relaxed);
      stats_.pageins.fetch_add(1, std::memory_order_relaxed);
      stats_.pagein_bytes.fetch_add(nbytes, std::memory_order_relaxed);
      left_host(*entity);
      break;
    case AccessResult::kPrefetched:
      stats_.prefetch_hits.fetch_add(1, std::memory_order_relaxed);
      stats_.pageins.fetch_add(1, std::memory_order_relaxed);
      stats_.pagein_bytes.fetch_add(nbytes, std::memory_order_relaxed);
      left_host(*entity);
      break;
  }
  MemoryPressure::get().note_resident(entity);
}

bool Pager::use(const EntityPtr& entity) {
  const EntityState before = entity->state();
  if (before == EntityState::kResident) {
    count(entity, entity->access());
    return true;
  }
  const Arrivals::Scope arriving(arrivals_, *entity);
  if (before == EntityState::kPagedOut || before == EntityState::kInQueued) {
    RECORD_USER_SCOPE("torch_lms::passive_pagein");
    try {
      count(entity, entity->access());
    } catch (const std::exception& error) {
      stats_.host_served.fetch_add(1, std::memory_order_relaxed);
      stats_.pagein_failures.fetch_add(1, std::memory_order_relaxed);
      TORCH_WARN_ONCE(
          "torch_lms: no room on the device for a storage of ",
          entity->nbytes(),
          " bytes that an op uses; the op works on the host copy, which is right but slow. Raise "
          "the limit, or use smaller batches. (",
          text_of(error),
          ") Further cases are counted in torch_lms.stats().host_served.");
      return false;
    }
    return true;
  }
  count(entity, entity->access());
  return true;
}

void Pager::call_off_pageout(const EntityPtr& entity) {
  const EntityState before = entity->state();
  if (before != EntityState::kOutQueued && before != EntityState::kPagingOut) {
    return;
  }
  const Arrivals::Scope arriving(arrivals_, *entity); // another thread may be faster
  AccessResult result = AccessResult::kResident;
  if (entity->touch(&result)) {
    count(entity, result);
  }
}

void Pager::raw_access(c10::StorageImpl* storage) {
  if (in_forked_child()) {
    return;
  }
  const EntityPtr entity = find(*storage);
  if (entity == nullptr) {
    return;
  }
  find_device_of(*entity).note_current_stream();
  hold_raw(entity); // before it comes in: making room for it must not push it out
  use(entity);
  MemoryPressure::get().record_use(entity);
}

void Pager::storage_released(const EntityPtr& entity) noexcept {
  left_host(*entity);
  entity->host_copy_released();
}

void Pager::keep_resident(const c10::Storage& storage) {
  const EntityPtr entity = find_or_track(*storage.unsafeGetStorageImpl(), false);
  if (entity == nullptr) {
    return; // Not PyTorch's own memory: it never moves anyway.
  }
  entity->pin();
  use(entity);
}

void Pager::release_resident(const c10::Storage& storage) {
  c10::StorageImpl& impl = *storage.unsafeGetStorageImpl();
  const EntityPtr entity = find(impl);
  if (entity == nullptr && why_not_movable(impl, find_device(impl.device())) != nullptr) {
    return; // It never moves anyway, and `keep_resident` counted nothing.
  }
  if (entity == nullptr || !entity->pinned()) {
    throw Error(
        "expected a storage that has been pinned with torch_lms.pin, found one that has not; call "
        "pin first, and unpin once for each pin");
  }
  entity->unpin();
}

// --- commits ----------------------------------------------------------------------

void Pager::commit_pageouts(std::vector<KeepAlive>& dropped, const Device* allocating) {
  std::vector<FinishedTransfer> later; // in use, or another device's
  for (FinishedTransfer& finished : out_.take_finished()) {
    if (allocating != nullptr && &find_device_of(*finished.entity) != allocating) {
      later.push_back(std::move(finished));
      continue;
    }
    const size_t nbytes = finished.entity->nbytes();
    if (finished.out != nullptr && finished.out->host != nullptr) {
      std::unique_ptr<DeviceBlock> garbage;
      CommitResult result = CommitResult::kInUse;
      try {
        result = finished.entity->commit_pageout(finished.out, &garbage);
      } catch (const std::bad_alloc&) { // for a few bytes: later, then
      }
      if (result == CommitResult::kInUse) {
        later.push_back(std::move(finished));
        continue;
      }
      if (result == CommitResult::kCommitted) {
        stats_.pageouts.fetch_add(1, std::memory_order_relaxed);
        stats_.pageout_bytes.fetch_add(static_cast<int64_t>(nbytes), std::memory_order_relaxed);
        paged_out_bytes_.fetch_add(static_cast<int64_t>(nbytes), std::memory_order_relaxed);
        paged_out_storages_.fetch_add(1, std::memory_order_relaxed);
        MemoryPressure::get().note_paged_out(finished.entity);
      }
    }
    if (finished.out != nullptr) {
      dropped.push_back(std::move(finished.out->keep));
    }
    out_.retire(nbytes);
  }
  if (!later.empty()) {
    out_.return_finished(std::move(later));
  }
}

void Pager::commit_pageins() {
  for (FinishedTransfer& finished : in_.take_finished()) {
    commit_pagein(finished);
    in_.retire(finished.entity->nbytes());
  }
}

void Pager::commit_finished(const Device* allocating) {
  std::vector<KeepAlive> dropped;
  if (out_.has_finished()) {
    commit_pageouts(dropped, allocating);
  }
  if (allocating == nullptr && in_.has_finished()) {
    commit_pageins();
  }
  if (allocating != nullptr) {
    std::lock_guard<std::mutex> lock(dropped_mutex_);
    for (KeepAlive& keep : dropped) {
      dropped_.push_back(std::move(keep));
    }
  } else {
    std::lock_guard<std::mutex> lock(dropped_mutex_);
    dropped.insert(
        dropped.end(),
        std::make_move_iterator(dropped_.begin()),
        std::make_move_iterator(dropped_.end()));
    dropped_.clear();
  }
}

void Pager::wait_pageouts() {
  const uint64_t last = out_.pending_until();
  uint64_t seen = out_.progress();
  auto progressed = std::chrono::steady_clock::now();
  for (bool over = false; !over || out_.has_finished();) {
    over = out_.is_over(last);
    commit_finished(); // while the others are copied
    const uint64_t before = seen;
    if (!over) {
      seen = out_.wait_for_progress(seen, kTurn_us);
    } else if (out_.has_finished()) {
      std::this_thread::sleep_for(std::chrono::microseconds(50)); // an op uses it
    }
    if (seen != before || !(over || out_.waits_for_ops())) {
      progressed = std::chrono::steady_clock::now();
    } else if (std::chrono::steady_clock::now() - progressed > kCommitPatience) {
      throw TransferFailed(
          "expected running ops to let go of storages that are to be paged out, found one still "
          "running after 60 s on another thread; wait for that thread first");
    }
  }
  const std::exception_ptr error = out_.take_error();
  stop_observing_if_idle();
  if (error != nullptr) {
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
  try {
    if (const std::exception_ptr error = in_.take_error()) {
      std::rethrow_exception(error);
    }
  } catch (const NoRoom&) {
    stats_.pagein_failures.fetch_add(1, std::memory_order_relaxed);
  } catch (const c10::OutOfMemoryError&) {
    stats_.pagein_failures.fetch_add(1, std::memory_order_relaxed);
  }
  commit_finished();
  stop_observing_if_idle();
}

void Pager::pagein_all() {
  std::exception_ptr failed;
  table_.for_each([&](const EntityPtr& entity) {
    const KeepAlive keep = entity->hold();
    if (keep == nullptr) {
      return;
    }
    try {
      const Arrivals::Scope arriving(arrivals_, *entity);
      if (entity->state() != EntityState::kResident) {
        count(entity, entity->access());
      }
      if (const FencePtr copy = entity->arrival()) {
        copy->wait(); // Ops may not be observed from here on.
      }
    } catch (...) {
      failed = std::current_exception();
    }
  });
  commit_finished();
  stop_observing_if_idle();
  if (failed != nullptr) {
    std::rethrow_exception(failed);
  }
}

} // namespace torch_lms
