#pragma once

#include <extension/policy/Pageouts.h>
#include <extension/policy/PolicyState.h>
#include <extension/policy/Wakefulness.h>

namespace torch_lms {

/// What goes out and what comes back before anybody has to wait for it.
///
/// Thread-safe: every method may be called from any thread, with and without the GIL. Waits for
/// nothing, but may allocate for prefetches.
class AheadOfNeed {
 public:
  AheadOfNeed(PolicyState& state, Wakefulness& wakefulness, Pageouts& pageouts)
      : state_(state), wakefulness_(wakefulness), pageouts_(pageouts) {}

  /// An op has ended that used entities of a device with a limit, where nothing sleeps or is
  /// captured.
  void after_op(Device& device, bool backward) {
    const bool planned = state_.planned.load(std::memory_order_relaxed);
    if (!planned || state_.gave_way.load(std::memory_order_relaxed)) {
      page_out(device, backward);
    }
    if (!planned) {
      prefetch(device, backward);
    }
  }

 private:
  void page_out(Device& device, bool backward);
  void page_out_cooled(Device& device, size_t missing_bytes);
  void prefetch(Device& device, bool backward);

  PolicyState& state_;
  Wakefulness& wakefulness_;
  Pageouts& pageouts_;
};

} // namespace torch_lms
