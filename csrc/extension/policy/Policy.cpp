#include <extension/policy/Policy.h>

#include <extension/base/Interpreter.h>

namespace torch_lms {

Policy::Policy(Pager& pager, const PolicyOptions& options) : state_(pager, options) {
  pager.set_listener(this);
}

void Policy::enable(Device& device, size_t limit_bytes, size_t min_bytes) {
  if (!enabled()) {
    state_.cycles.forget();
  }
  state_.watch_of(device).begin(device, state_.options);
  state_.pager.out_queue().start_actions();
  state_.pager.in_queue().start_actions();
  if (min_bytes > tracked_from_bytes_.load(std::memory_order_relaxed)) {
    state_.pager.look_for_all(); // smaller ones may be out
  }
  tracked_from_bytes_.store(min_bytes, std::memory_order_relaxed);
  pageouts_.forget_errors(); // the host may have more room now
  wakefulness_.begin();
  state_.pager.kept_copies().keep(true);
  // What is known already, from paging by hand or from the last time.
  state_.pager.table().for_each([&](const EntityPtr& entity) {
    if (entity->gone() || &entity->device() != &device) {
      return;
    }
    if (entity->state() == EntityState::kPagedOut) {
      was_paged_out(entity);
    } else {
      became_resident(entity);
    }
  });
  device.limit(limit_bytes, room_);
  wakefulness_.learn();
  device.note_busy_streams();
  if (!wakefulness_.fill_budget(device, 0) && wakefulness_.may_vacate()) {
    const WithoutGil no_gil;
    room_.wait_for_room(device, 0); // what has no room yet may find it at the first op
  }
}

void Policy::disable() {
  wakefulness_.end();
  state_.pager.devices().for_each([](Device& device) { device.unlimit(); });
  for (DeviceWatch& watch : state_.watches) {
    watch.end();
  }
}

void Policy::track_none() {
  state_.pager.kept_copies().keep(false);
  if (state_.pager.active()) {
    state_.pager.look_for_all(); // what has found no room
  } else {
    state_.pager.kept_copies().unwatch_all();
  }
  state_.feed->stop();
  tracked_from_bytes_.store(SIZE_MAX, std::memory_order_relaxed);
}

void Policy::track_all(size_t min_bytes) {
  tracked_from_bytes_.store(min_bytes, std::memory_order_relaxed);
  state_.feed->start();
}

// --- where entities are ---------------------------------------------------------

void Policy::became_resident(const EntityPtr& entity) {
  if (enabled()) {
    state_.watch_of(entity->device()).note_resident(entity);
  }
}

void Policy::was_paged_out(const EntityPtr& entity) {
  if (enabled()) {
    const uint64_t next = entity->uses.history().next(state_.cycles.now(), state_.cycles.shape());
    state_.watch_of(entity->device()).note_paged_out(entity, next);
  }
}

void Policy::was_cancelled(const EntityPtr& entity) {
  if (enabled()) {
    state_.watch_of(entity->device()).note_cancelled(entity->nbytes());
  }
}

// --- what ops tell ----------------------------------------------------------------

void Policy::after_op(Device* used, bool on_main_thread, bool of_program, bool backward) {
  if (!enabled()) {
    return;
  }
  if (wakefulness_.after_op(on_main_thread, of_program, backward)) {
    state_.listener->backward_ended();
  }
  if (used == nullptr || used->limit_bytes() == 0 || used->capturing() ||
      attention() == Attention::kAsleep) {
    return;
  }
  ahead_.after_op(*used, backward);
}

} // namespace torch_lms
