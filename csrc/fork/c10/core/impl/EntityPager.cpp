#include <c10/core/impl/EntityPager.h>

#include <string>
#include <utility>

#include <c10/core/impl/EntityStorageImpl.h>
#include <c10/core/impl/Error.h>
#include <c10/core/impl/ForkGate.h>
#include <c10/core/impl/SwapCounters.h>

namespace c10 {
namespace impl {

using torch_lms::AccessResult;
using torch_lms::EntityState;

EntityPaging::EntityPaging(SwapDevice& device, size_t nbytes, SwapQueues queues)
    : device_(device), queues_(queues) {
  auto memory = std::make_unique<ParkedMemory>(device, nbytes);
  memory_ = memory.get();
  entity_ = std::make_shared<torch_lms::CudaEntityStorageImpl>(
      std::move(memory), device.backend(), nbytes, 0);
}

void EntityPaging::check_not_capturing(bool capturing) const {
  if (capturing) {
    throw torch_lms::PageoutRefused(
        "expected no capture of a CUDA graph while a tensor moves between device and host, found "
        "one on " +
        device_.device().str() +
        "; page out before or after the capture, and access what has been paged out once before "
        "it, so that its address can become part of the graph");
  }
}

// --- page-out -----------------------------------------------------------------

bool EntityPaging::request_pageout_locked(DataPtr& data) {
  check_not_capturing(device_.capturing_in_use());
  switch (entity_->state()) {
    case EntityState::kOutQueued:
    case EntityState::kPagingOut:
    case EntityState::kPagedOut:
      return false;
    case EntityState::kInQueued:
    case EntityState::kPagingIn:
      if (entity_->cancel_pagein()) {
        queues_.in.erase(entity_.get());
        return false;
      }
      pagein_locked();
      break;
    case EntityState::kResident:
      break;
  }
  device_.note_streams_in_use();
  if (!memory_->parked()) {
    const Device device = data.device();
    memory_->park(std::move(data));
    data = DataPtr(nullptr, device);
  }
  try {
    if (entity_->request_pageout()) {
      return true;
    }
  } catch (...) {
    unpark_locked(data);
    throw;
  }
  unpark_locked(data);
  return false;
}

void EntityPaging::cancel_pageout_locked() {
  const EntityState state = entity_->state();
  AccessResult result = AccessResult::kResident;
  if (state == EntityState::kOutQueued || state == EntityState::kPagingOut) {
    entity_->touch(&result);
  }
  count_access(result);
}

void EntityPaging::count_access(AccessResult result) noexcept {
  // What came back is counted where its memory is, see ParkedMemory.
  if (result == AccessResult::kCancelledPageout) {
    count(swap_counters().cancelled_pageouts);
  }
}

// --- page-in ------------------------------------------------------------------

bool EntityPaging::request_pagein_locked() {
  check_not_capturing(device_.capturing());
  cancel_pageout_locked(); // the cheapest page-in is not to leave
  return entity_->request_pagein();
}

// Note [Passive page-ins]
// A passive page-in goes to the head of the queue that it shares with prefetches, past all
// of them that have not begun. The thread that waits for it does not wait for the worker to
// come round, though: whichever of the two is first at the head moves it, the thread at once
// where the worker is busy, stopped or held. Both copy on one stream, so that the order of the
// queue is the order of the copies.
void EntityPaging::pagein_passive_locked() {
  memory_->set_passive(true);
  queues_.in.erase(entity_.get());
  entity_->request_pagein();
  try {
    queues_.in.enqueue_passive(entity_);
  } catch (const torch_lms::Error&) {
    // Somebody waits for the queue, or the environment is closed: this thread alone moves it.
  }
  try {
    entity_->access();
  } catch (...) {
    queues_.in.erase(entity_.get());
    memory_->set_passive(false);
    throw;
  }
  queues_.in.erase(entity_.get());
  memory_->set_passive(false);
}

void EntityPaging::pagein_locked() {
  check_not_capturing(device_.capturing());
  device_.note_current_stream();
  const EntityState state = entity_->state();
  if (state == EntityState::kPagedOut || state == EntityState::kInQueued) {
    pagein_passive_locked();
  } else {
    count_access(entity_->access());
  }
}

void EntityPaging::unpark_locked(DataPtr& data) {
  if (entity_->state() != EntityState::kResident) {
    return; // the memory is a worker's
  }
  if (memory_->parked()) {
    data = memory_->take();
  }
  device_.note_use(data, memory_->home_stream());
}

// --- end ------------------------------------------------------------------------

void EntityPaging::release() noexcept {
  DataPtr garbage; // freed when nothing is held
  const ForkGate::Passage passage;
  queues_.out.erase(entity_.get());
  queues_.in.erase(entity_.get());
  std::lock_guard<std::mutex> lock(mutex_);
  memory_->expire();
  bool called_off = false;
  try {
    const EntityState state = entity_->state();
    AccessResult ignored = AccessResult::kResident;
    called_off = (state == EntityState::kOutQueued || state == EntityState::kPagingOut) &&
                 entity_->touch(&ignored);
  } catch (...) {
    // The device is in error; so is whatever the copy would have written.
  }
  if (!called_off) {
    entity_->host_copy_released();
  }
  memory_->leave_host();
  garbage = memory_->take();
}

// --- the storage's pager ----------------------------------------------------------

void EntityPager::pagein(DataPtr& data) {
  const ForkGate::Passage passage;
  std::lock_guard<std::mutex> lock(paging_->mutex());
  if (resident()) {
    return; // another thread was faster
  }
  paging_->pagein_locked();
  paging_->unpark_locked(data);
  // Until the copy has arrived, every thread that comes orders its own stream after it.
  set_resident(paging_->settled_locked());
}

bool EntityPager::pageout(DataPtr& data) {
  const ForkGate::Passage passage;
  std::lock_guard<std::mutex> lock(paging_->mutex());
  set_resident(false); // from now on accesses wait for the mutex
  try {
    if (paging_->request_pageout_locked(data)) {
      queues_.out.enqueue(paging_->entity());
      return true;
    }
  } catch (...) {
    paging_->cancel_pageout_locked();
    paging_->unpark_locked(data);
    set_resident(paging_->settled_locked());
    throw;
  }
  set_resident(paging_->settled_locked());
  return false;
}

bool EntityPager::prefetch() {
  const ForkGate::Passage passage;
  std::lock_guard<std::mutex> lock(paging_->mutex());
  if (!paging_->request_pagein_locked()) {
    return false;
  }
  try {
    queues_.in.enqueue(paging_->entity());
  } catch (...) {
    paging_->entity()->cancel_pagein();
    throw;
  }
  count(swap_counters().prefetches);
  return true;
}

} // namespace impl
} // namespace c10
