#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include <extension/memory/Device.h>
#include <extension/policy/DeviceWatch.h>

namespace torch_lms {

/// Addresses that would be one free block, but for the entities that lie there.
struct CrowdedWindow {
  std::vector<EntityPtr> inside; ///< Empty if there is no such window. The largest come first.
  std::vector<EntityPtr> cheapest; ///< In the window that costs least to empty by page-outs.
  uintptr_t begin = 0;
  uintptr_t end = 0;

  bool holds(const void* address) const noexcept {
    const auto at = reinterpret_cast<uintptr_t>(address);
    return begin <= at && at < end;
  }

  /// What is left inside, unless another window costs less by now: this one was chosen for being
  /// movable. `copy_cost` as for `find_crowded_window`.
  const std::vector<EntityPtr>& to_page_out(size_t copy_cost) const;
};

/// The window of at least `nbytes` that costs least to empty among those whose storages find place
/// elsewhere on the device; if there is none, the cheapest.
/// `segments`: of `Device::blocks`; `victims`: what may go, by its next use; the very next stay;
/// `copy_cost`: of a page-out that must copy, where one without a copy costs 1.
CrowdedWindow find_crowded_window(
    const std::vector<std::vector<AllocatorBlock>>& segments,
    const std::vector<Victim>& victims,
    size_t nbytes,
    size_t copy_cost);

} // namespace torch_lms
