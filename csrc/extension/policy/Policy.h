#pragma once

#include <atomic>
#include <cstdint>

#include <extension/base/Options.h>
#include <extension/policy/AheadOfNeed.h>
#include <extension/policy/LargePieces.h>
#include <extension/policy/MemoryReport.h>
#include <extension/policy/Pageouts.h>
#include <extension/policy/PolicyState.h>
#include <extension/policy/RoomMaker.h>
#include <extension/policy/Wakefulness.h>
#include <extension/transfer/Pager.h>

namespace torch_lms {

/// Automatic mode: keeps the memory of tensors on devices within their limits. What it does is in
/// its parts: `Wakefulness`, `Pageouts`, `LargePieces`, `RoomMaker` and `AheadOfNeed`.
///
/// Thread-safe: every method may be called from any thread, with and without the GIL. `enable`
/// and `wait_for_pageouts` wait as `Room::make_room`; the others wait for nothing, but `after_op`
/// may allocate for prefetches.
class Policy final : public PagerListener {
 public:
  explicit Policy(Pager& pager, const PolicyOptions& options = {});

  /// Set up before anything else is called.
  void set_feed(OpFeed* feed) noexcept {
    state_.feed = feed;
  }
  void set_listener(PolicyListener* listener) noexcept {
    state_.listener = listener;
  }

  /// Begins to keep `device` within `limit_bytes`, or changes the limit. Storages of at least
  /// `min_bytes` move; those known already go out at once until the rest fits.
  void enable(Device& device, size_t limit_bytes, size_t min_bytes);
  /// Ends it for all devices. What is out comes in with the ops that use it, until `track_none`.
  void disable();
  /// Storages do not become entities any more, and none is out that ops would have to look for: no
  /// block is watched from here on. See Note [Copies that come while the mode ends].
  void track_none();

  /// For chaos mode: every storage from `min_bytes` on is an entity, without a limit.
  void track_all(size_t min_bytes);

  /// Whether storages of that size become entities as ops use them.
  bool tracks(size_t nbytes) const noexcept {
    return nbytes >= tracked_from_bytes();
  }
  size_t tracked_from_bytes() const noexcept {
    return tracked_from_bytes_.load(std::memory_order_relaxed);
  }
  bool enabled() const noexcept {
    return wakefulness_.enabled();
  }
  Attention attention() const noexcept {
    return wakefulness_.attention();
  }

  // --- what ops tell ---

  /// The time of uses: one tick for each outermost op.
  CycleTracker& cycles() noexcept {
    return state_.cycles;
  }
  /// An outermost op of the calling thread has ended that used entities of `used`; null if it used
  /// none. Also such ops make cycles: a program of small tensors has no others.
  /// `on_main_thread`: see Note [Learn, sleep, arm]; `of_program`: see Note [The program's thread].
  void after_op(Device* used, bool on_main_thread, bool of_program, bool backward);
  Wakefulness& wakefulness() noexcept {
    return wakefulness_;
  }

  // --- plans ---

  /// While a plan is carried out: nothing goes or comes ahead of need but by the plan.
  void set_planned(bool planned) noexcept {
    if (state_.planned.load(std::memory_order_relaxed) !=
        planned) { // else many threads write to it
      state_.planned.store(planned, std::memory_order_relaxed);
    }
  }
  Placeholders& placeholders() noexcept {
    return state_.placeholders;
  }
  /// See `RoomMaker`.
  void wait_for_pageouts(Device& device, size_t most_bytes) {
    room_.wait_for_pageouts(device, most_bytes);
  }
  /// See `LargePieces`.
  void hold_placeholders(Device& device) {
    pieces_.hold_placeholders(device);
  }
  /// The most that was in use at a large allocation on a device since the last call; 0 without one.
  size_t take_recent_peak(const Device& device) noexcept {
    return state_.watch_of(device).take_recent_peak();
  }
  /// The same in all, but for the small allocations since the last look at memory.
  size_t take_cycle_peak(const Device& device) noexcept {
    return state_.watch_of(device).take_cycle_peak();
  }

  // --- PagerListener ---
  void became_resident(const EntityPtr& entity) override;
  void was_paged_out(const EntityPtr& entity) override;
  void was_cancelled(const EntityPtr& entity) override;

  MemoryReport report(Device& device) {
    return report_memory(device, state_, wakefulness_);
  }

 private:
  PolicyState state_;
  Wakefulness wakefulness_{state_};
  Pageouts pageouts_{state_, wakefulness_};
  LargePieces pieces_{state_, wakefulness_, pageouts_};
  RoomMaker room_{state_, wakefulness_, pageouts_, pieces_};
  AheadOfNeed ahead_{state_, wakefulness_, pageouts_};
  std::atomic<size_t> tracked_from_bytes_{SIZE_MAX};
};

} // namespace torch_lms
