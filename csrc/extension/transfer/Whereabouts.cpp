#include <extension/transfer/Whereabouts.h>

#include <new>

namespace torch_lms {

void Whereabouts::left_device(const EntityPtr& entity) {
  paged_out_bytes_.fetch_add(static_cast<int64_t>(entity->nbytes()), std::memory_order_relaxed);
  paged_out_storages_.fetch_add(1, std::memory_order_relaxed);
  listener_->was_paged_out(entity);
}

void Whereabouts::left_host(const EntityStorageImpl& entity) noexcept {
  paged_out_bytes_.fetch_sub(static_cast<int64_t>(entity.nbytes()), std::memory_order_relaxed);
  paged_out_storages_.fetch_sub(1, std::memory_order_relaxed);
}

/// Other streams have to wait for it.
void Whereabouts::note_arrival(const EntityPtr& entity) {
  if (FencePtr copy = entity->arrival()) {
    try {
      arrivals_.add(entity, nullptr, copy);
    } catch (const std::bad_alloc&) {
      copy->wait();
    }
  }
}

void Whereabouts::came(const EntityPtr& entity, AccessResult how) {
  switch (how) {
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
    kept_.add(entity);
  }
  listener_->became_resident(entity);
}

} // namespace torch_lms
