#include <extension/access/ManualPaging.h>

#include <entity/Error.h>

#include <extension/transfer/PageoutBatch.h>

namespace torch_lms {
namespace {

[[noreturn]] void refuse(const c10::Storage& storage, const std::string& why) {
  const std::string size = has_bytes(*storage.unsafeGetStorageImpl())
                               ? std::to_string(storage.nbytes()) + " bytes"
                               : "a symbolic size";
  throw PageoutRefused(
      "expected a storage that can be paged out, found one of " + size + " on " +
      storage.device().str() + ": " + why +
      "; leave it where it is, or page out a copy of it (tensor.clone())");
}

} // namespace

void ManualPaging::add(PageoutBatch& batch, const c10::Storage& storage) {
  c10::StorageImpl& impl = *storage.unsafeGetStorageImpl();
  if (has_bytes(impl) && impl.nbytes() == 0) {
    return;
  }
  Device* device = pager_.devices().find(impl.device());
  if (device != nullptr && device->capturing()) {
    refuse(storage, "a CUDA graph is being captured, and nothing moves meanwhile");
  }
  // The program may have given the storage other memory: then the next entity is the one.
  for (EntityPtr entity; entity == nullptr || (entity->replaced() && !entity->used_by_ops());) {
    entity = pager_.find_or_track(impl, FoundBy::kHand);
    if (entity == nullptr) {
      const char* why = why_not_movable(impl, device);
      refuse(storage, why != nullptr ? why : "it has no bytes");
    }
    add(batch, storage, entity);
  }
}

void ManualPaging::add(PageoutBatch& batch, const c10::Storage& storage, const EntityPtr& entity) {
  if (entity->cancel_pagein()) {
    pager_.in_queue().erase(entity.get());
  }
  if (entity->state() == EntityState::kPagingIn) {
    pager_.bring_in(entity);
  }
  if (entity->fixed()) {
    refuse(
        storage,
        "it has been pinned (torch_lms.pin, numpy, DLPack, a captured graph, a collective)");
  }
  if (!entity->keeps_copy() || !pager_.requests().drop_unwritten(entity)) {
    batch.add(entity); // or an op is using it: not now
  }
}

int64_t ManualPaging::pageout(const std::vector<c10::Storage>& storages) {
  addresses_.take_back();
  pager_.out_queue().start_actions();
  const OpCallbacks::Request request(callbacks_);
  callbacks_.note_by_hand();
  PageoutBatch batch(pager_.out_queue(), /*by_hand=*/true);
  try {
    for (const c10::Storage& storage : storages) {
      add(batch, storage);
    }
  } catch (const PageoutRefused&) {
    batch.submit(); // Those before it go out.
    throw;
  }
  batch.submit();
  return static_cast<int64_t>(batch.count());
}

int64_t ManualPaging::prefetch(const std::vector<c10::Storage>& storages, bool start) {
  if (start) {
    pager_.in_queue().start_actions();
  }
  int64_t count = 0;
  for (const c10::Storage& storage : storages) {
    count += pager_.requests().prefetch(storage) ? 1 : 0;
  }
  return count;
}

void ManualPaging::pin(const c10::Storage& storage) {
  addresses_.before_raw_access(*storage.unsafeGetStorageImpl());
  const EntityPtr entity = pager_.fix(*storage.unsafeGetStorageImpl());
  if (entity == nullptr) {
    return; // Not PyTorch's own memory: it never moves anyway.
  }
  if (pager_.use(entity) == Place::kHost) {
    entity->end_service(); // It comes in when there is room, and stays then.
  }
  entity->release_copy();
}

void ManualPaging::unpin(const c10::Storage& storage) {
  c10::StorageImpl& impl = *storage.unsafeGetStorageImpl();
  if (pager_.unfix(impl) ||
      (pager_.find(impl) == nullptr &&
       why_not_movable(impl, pager_.devices().find(impl.device())) != nullptr)) {
    return; // Or it never moves anyway, and `pin` counted nothing.
  }
  throw Error(
      "expected a storage that has been pinned with torch_lms.pin, found one that has not; call "
      "pin first, and unpin once for each pin");
}

std::string ManualPaging::state(const c10::Storage& storage) {
  const EntityPtr entity = pager_.find(*storage.unsafeGetStorageImpl());
  return to_string(entity == nullptr ? EntityState::kResident : entity->state());
}

void ManualPaging::wait_pageouts() {
  addresses_.take_back();
  pager_.wait_pageouts();
  callbacks_.stop_if_idle();
}

void ManualPaging::wait_pageins() {
  pager_.wait_pageins();
  callbacks_.stop_if_idle();
}

void ManualPaging::pagein_all() {
  pager_.pagein_all();
  callbacks_.end_requests();
}

} // namespace torch_lms
