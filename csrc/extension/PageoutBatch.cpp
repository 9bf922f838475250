#include <extension/PageoutBatch.h>

#include <string>
#include <unordered_map>
#include <utility>

#include <ATen/record_function.h>
#include <entity/Error.h>
#include <entity/OpClock.h>

#include <extension/MemoryPressure.h>
#include <extension/OpObserver.h>
#include <extension/Pager.h>
#include <extension/TorchStorageBinding.h>

namespace torch_lms {
namespace {

// So many that a shared fence pays, so few that the first copy begins soon.
constexpr size_t kMostRequests = 32;

constexpr const char* kInUse =
    "it is in use by a running op, or has been pinned (torch_lms.pin, numpy, DLPack, a captured "
    "graph, a collective)";

[[noreturn]] void refuse(const c10::Storage& storage, const std::string& why) {
  throw PageoutRefused(
      "expected a storage that can be paged out, found one of " + std::to_string(storage.nbytes()) +
      " bytes on " + storage.device().str() + ": " + why +
      "; leave it where it is, or page out a copy of it (tensor.clone())");
}

void check_movable(const c10::Storage& storage, const EntityPtr& known, Device* device) {
  if (known == nullptr || known->state() == EntityState::kResident) {
    if (const char* why = why_not_movable(*storage.unsafeGetStorageImpl(), device)) {
      refuse(storage, why);
    }
  }
  if (device->capturing()) {
    refuse(storage, "a CUDA graph is being captured, and nothing moves meanwhile");
  }
}

} // namespace

PageoutBatch::PageoutBatch() {
  Pager::get().requests().fetch_add(1);
}

PageoutBatch::~PageoutBatch() {
  abandon();
  Pager::get().requests().fetch_sub(1);
}

void PageoutBatch::abandon() noexcept {
  for (const Request& request : requests_) {
    request.entity->abandon_request();
  }
  requests_.clear();
}

void PageoutBatch::add(const c10::Storage& storage) {
  Pager& pager = Pager::get();
  c10::StorageImpl& impl = *storage.unsafeGetStorageImpl();
  if (impl.nbytes() == 0) {
    return;
  }
  if (HostMark* mark = host_mark(impl)) {
    const EntityPtr entity = mark->entity;
    if (entity->cancel_pagein()) {
      pager.in_queue().erase(entity.get());
    }
    if (entity->state() != EntityState::kPagingIn) {
      return;
    }
    pager.use(entity);
  }
  Device* device = find_device(impl.device());
  check_movable(storage, pager.table().find(&impl), device);
  if (observe_ops()) {
    device->note_busy_streams();
  }
  const EntityPtr entity = pager.find_or_track(impl, false);
  device->note_current_stream();
  if (auto transfer = entity->begin_request()) {
    requests_.push_back(Request{storage, entity, std::move(transfer)});
    if (requests_.size() == kMostRequests) {
      submit();
    }
  } else if (entity->state() == EntityState::kResident && entity->pinned()) {
    refuse(storage, kInUse);
  }
}

/// One for each device, unless ops of other threads may use the bytes without having pinned
/// them: see Note [Who may still use a storage].
void PageoutBatch::take_fences() {
  const EarlierOps earlier{OpClock::get().tick(), OpClock::this_thread()};
  const bool doubtful = earlier.running();
  std::unordered_map<const TransferBackend*, FencePtr> fences;
  for (const Request& request : requests_) {
    request.transfer->earlier = earlier;
    request.transfer->doubtful = doubtful;
    if (!doubtful) {
      FencePtr& fence = fences[request.entity->backend()];
      if (fence == nullptr) {
        fence = find_device_of(*request.entity).backend()->submitted_work();
      }
      request.transfer->after = fence;
    }
  }
}

void PageoutBatch::submit() {
  if (requests_.empty()) {
    return;
  }
  take_fences();
  std::vector<EntityPtr> going;
  going.reserve(requests_.size());
  const c10::Storage* in_use = nullptr;
  for (const Request& request : requests_) {
    RECORD_USER_SCOPE("torch_lms::pageout");
    if (request.entity->finish_request(request.transfer)) {
      going.push_back(request.entity);
    } else if (request.entity->pinned()) {
      in_use = &request.storage;
    }
  }
  const std::vector<Request> finished = std::exchange(requests_, {});
  const size_t count = going.size();
  try {
    Pager::get().out_queue().enqueue_all(going);
  } catch (...) { // Somebody is waiting for the queue, say.
    for (const EntityPtr& entity : going) {
      Pager::get().take_back(entity);
    }
    throw;
  }
  enqueued_ += count;
  if (in_use != nullptr) {
    refuse(*in_use, kInUse);
  }
}

} // namespace torch_lms
