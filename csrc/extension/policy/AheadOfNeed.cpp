#include <extension/policy/AheadOfNeed.h>

#include <algorithm>
#include <utility>

namespace torch_lms {

/// At the end of an op: keeps the high watermark, or follows the plan.
void AheadOfNeed::page_out(Device& device, bool backward) {
  DeviceWatch& watch = state_.watch_of(device);
  const bool beyond = state_.gave_way.load(std::memory_order_relaxed);
  if ((backward && !beyond) || !watch.take_allocated()) {
    return; // A backward frees more than it allocates; and asking the allocator is slow.
  }
  if (beyond && !wakefulness_.may_vacate()) {
    return;
  }
  state_.gave_way.store(false, std::memory_order_relaxed);
  const size_t limit = device.limit_bytes();
  const size_t used = device.use().allocated_bytes;
  const size_t stays = used - std::min(used, state_.pager.out_queue().pending_bytes());
  const size_t margin = watch.margin_bytes();
  const size_t high = limit - std::min(limit, margin);
  watch.note_stays(stays);
  if (stays > high) {
    pageouts_.request(device, stays - high + margin / 4);
  } else if (state_.cycles.knows_cycle()) { // See Note [Planned page-outs].
    if (const size_t missing = watch.planned_now_bytes()) {
      page_out_cooled(device, missing);
    }
  }
}

void AheadOfNeed::page_out_cooled(Device& device, size_t missing_bytes) {
  const CycleShape shape = state_.cycles.shape();
  const uint64_t now = state_.cycles.now();
  std::vector<EntityPtr> chosen;
  for (Victim& victim :
       state_.watch_of(device).resident_by_next_use(state_.cycles, wakefulness_.eligible_from())) {
    if (missing_bytes == 0) {
      break;
    }
    if (victim.next_use < shape.began + shape.forward) {
      continue; // needed in this forward
    }
    if (now - victim.entity->uses.last() >= state_.options.ops_to_cool) {
      missing_bytes -= std::min(missing_bytes, victim.entity->nbytes());
      chosen.push_back(std::move(victim.entity));
    }
  }
  pageouts_.page_out(device, chosen);
}

void AheadOfNeed::prefetch(Device& device, bool backward) {
  DeviceWatch& watch = state_.watch_of(device);
  if (!watch.anything_paged_out() ||
      state_.cycles.now() % state_.options.ops_between_prefetches != 0) {
    return;
  }
  const CycleShape shape = state_.cycles.shape();
  const size_t limit = device.limit_bytes();
  const size_t largest = watch.largest_recent_bytes();
  // Where there is no plan yet, what a layer of inference lets go of is what the next one needs.
  const bool spares_more = backward || shape.length == 0;
  // Beyond the high watermark it would go out again at once.
  const size_t reserve =
      (spares_more ? state_.options.backward_reserve : state_.options.forward_reserve) * largest +
      watch.margin_bytes();
  // No more than half of the limit, so that small limits prefetch at all.
  size_t occupied = std::min(reserve, limit / 2) + device.use().allocated_bytes +
                    state_.pager.in_queue().pending_bytes();
  // See Note [Room in batches].
  if (backward &&
      occupied + std::min(limit / 16, state_.options.max_prefetch_batch_bytes) > limit) {
    return;
  }
  uint64_t horizon = backward ? UINT64_MAX : UseHistory::kUnknown / 2;
  if (shape.length != 0) {
    horizon = shape.began + (backward ? shape.length : shape.forward);
  }
  while (occupied < limit &&
         state_.pager.in_queue().pending_bytes() < state_.options.max_prefetch_pending_bytes) {
    const EntityPtr entity = watch.next_prefetch(state_.cycles, horizon, limit - occupied);
    if (entity == nullptr || !state_.pager.requests().prefetch_ahead(
                                 entity, state_.options.contiguous_reserve * largest)) {
      break;
    }
    occupied += entity->nbytes();
  }
}

} // namespace torch_lms
