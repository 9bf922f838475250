#pragma once

#include <extension/policy/CrowdedWindow.h>
#include <extension/policy/Pageouts.h>
#include <extension/policy/PolicyState.h>
#include <extension/policy/Wakefulness.h>

namespace torch_lms {

/// Memory in one piece, for large blocks and for placeholders.
///
/// Thread-safe: every method may be called from any thread, with and without the GIL.
class LargePieces {
 public:
  LargePieces(PolicyState& state, Wakefulness& wakefulness, Pageouts& pageouts)
      : state_(state), wakefulness_(wakefulness), pageouts_(pageouts) {}

  /// See `Room::make_contiguous`. Waits for page-outs as that says.
  void make_contiguous(Device& device, size_t nbytes);

  /// Holds the placeholders that are missing, as far as there is room: moves storages aside for
  /// them, and pages nothing out. Waits for nothing.
  void hold_placeholders(Device& device);

 private:
  std::vector<Victim> victims_on(Device& device);
  size_t copy_cost();
  bool move_out_of(const CrowdedWindow& window, const EntityPtr& entity);
  bool move_aside(CrowdedWindow& window);
  bool trade_places(Device& device, CrowdedWindow& window, std::vector<Victim> victims);
  bool let_go(Device& device, const CrowdedWindow& window);
  bool hold_placeholder(Device& device, size_t nbytes);

  PolicyState& state_;
  Wakefulness& wakefulness_;
  Pageouts& pageouts_;
};

} // namespace torch_lms
