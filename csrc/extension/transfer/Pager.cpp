#include <extension/transfer/Pager.h>

#include <chrono>
#include <exception>
#include <thread>

#include <ATen/record_function.h>
#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>
#include <entity/Error.h>

#include <extension/base/Compat.h>
#include <extension/base/ErrorText.h>
#include <extension/base/Interpreter.h>
#include <extension/base/ThreadContext.h>

#ifdef TORCH_LMS_WITH_CUDA
#include <cuda_runtime_api.h>
#endif

namespace torch_lms {
namespace {

using Clock = std::chrono::steady_clock;

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

Pager::Pager(Devices& devices) : devices_(devices), state_(&begin_worker) {}

EntityPtr Pager::make_entity(c10::StorageImpl& storage, FoundBy by) {
  Device* device = has_bytes(storage) ? devices_.find(storage.device()) : nullptr;
  if (why_not_movable(storage, device) != nullptr) {
    return nullptr;
  }
  // What the limit does not count need not go; and nobody has watched who has taken its address.
  if (by != FoundBy::kHand && device->limit_bytes() != 0 &&
      !device->counts(storage._mutable_data_ptr_no_checks())) {
    return nullptr;
  }
  state_.kept.lend_to(*device->pool());
  return std::make_shared<Entity>(
      std::make_unique<TorchStorageBinding>(&storage, *device, *this),
      storage,
      *device,
      storage.nbytes(),
      by == FoundBy::kOp ? observed_since_.load(std::memory_order_acquire) : OpClock::get().tick());
}

EntityPtr Pager::find_or_track(c10::StorageImpl& storage, FoundBy by) {
  if (EntityPtr entity = state_.table.find(storage)) {
    return entity;
  }
  if (by == FoundBy::kHand) {
    look_for_all(); // before anybody can miss it
  }
  EntityPtr made;
  EntityPtr entity =
      state_.table.find_or_make(storage, [&] { return made = make_entity(storage, by); });
  note_made(made);
  return entity;
}

EntityPtr Pager::fix(c10::StorageImpl& storage) {
  look_for_all();
  EntityPtr made;
  EntityPtr entity =
      state_.table.fix(storage, [&] { return made = make_entity(storage, FoundBy::kHand); });
  note_made(made);
  return entity;
}

void Pager::note_made(const EntityPtr& entity) {
  if (entity != nullptr) {
    if (entity->device().capturing()) {
      entity->fix(); // Its address is part of the graph: it never moves.
    }
    state_.whereabouts.was_made(entity);
  }
}

// --- use ------------------------------------------------------------------------

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
    const bool was_resident = entity->state() == EntityState::kResident;
    try {
      result = access(entity);
    } catch (const std::exception& error) {
      state_.stats.pagein_failures.fetch_add(1, std::memory_order_relaxed);
      if (entity->serve()) {
        note_served(entity, text_of(error));
        return Place::kHost;
      }
      if (entity->state() == EntityState::kDropped) {
        entity->refuse(text_of(error));
        return Place::kNowhere;
      }
      if (was_resident || dynamic_cast<const TransferFailed*>(&error) != nullptr) {
        throw; // There was room: the device is in error, and would be the next time, too.
      }
      continue; // another thread has brought it in meanwhile
    }
    if (result == AccessResult::kServed) {
      note_served(entity);
      return Place::kHost;
    }
    state_.whereabouts.came(entity, result);
    return Place::kDevice;
  }
}

void Pager::note_served(const EntityPtr& entity, const std::string& why) {
  state_.stats.host_served.fetch_add(1, std::memory_order_relaxed);
  TORCH_WARN_ONCE(
      "torch_lms: no room on the device for a storage of ",
      entity->nbytes(),
      " bytes that is in use; it is used where it is on the host, which is right but slow. Raise "
      "the limit, or use smaller batches.",
      why.empty() ? why : " (" + why + ")",
      " Further cases are counted in torch_lms.stats().host_served.");
}

void Pager::released(const std::shared_ptr<EntityStorageImpl>& entity) noexcept {
  state_.whereabouts.left_host(*entity);
  if (const KeepAlive storage = entity->try_to_hold()) { // which has been given other memory
    compat::allow_access(*std::static_pointer_cast<c10::Storage>(storage)->unsafeGetStorageImpl());
  }
  entity->host_copy_released();
}

void Pager::bring_in(const EntityPtr& entity) {
  entity->pin();
  const auto at_end = c10::make_scope_exit([&] { entity->unpin(); });
  if (use(entity) == Place::kHost) {
    entity->end_service();
  }
}

void Pager::make_dropped_again() {
  this_thread().undropping = true;
  const auto until_then = c10::make_scope_exit([] { this_thread().undropping = false; });
  state_.table.for_each([&](const EntityPtr& entity) {
    const KeepAlive keep = entity->hold();
    if (keep != nullptr && entity->state() == EntityState::kDropped) {
      bring_in(entity);
    }
  });
}

void Pager::pagein_all() {
  std::exception_ptr failed;
  const auto deadline = Clock::now() + Commits::kPatience;
  state_.table.for_each([&](const EntityPtr& entity) {
    const KeepAlive keep = entity->hold();
    try {
      while (keep != nullptr && entity->state() != EntityState::kResident) {
        const AccessResult result = access(entity);
        state_.whereabouts.came(entity, result);
        if (result != AccessResult::kServed) {
          break;
        }
        entity->end_service(); // Ops of other threads use the host copy: until they end.
        if (Clock::now() > deadline) {
          throw TransferFailed(
              "expected running ops to let go of storages that are to be paged in, found one still "
              "running after 60 s on another thread; wait for that thread first");
        }
        std::this_thread::sleep_for(Commits::kMomentForOps);
      }
    } catch (...) {
      failed = std::current_exception();
    }
  });
  state_.arrivals.wait(); // Ops may not be observed from here on.
  commit_finished();
  if (failed != nullptr) {
    std::rethrow_exception(failed);
  }
}

} // namespace torch_lms
