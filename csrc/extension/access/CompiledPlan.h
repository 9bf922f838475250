#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <c10/core/Device.h>

namespace torch_lms {

/// What happens before and after one op. Storages are named by the numbers of the cycle that was
/// recorded.
struct PlannedOp {
  uint64_t key = 0; ///< See `TraceOp`.
  std::vector<int32_t> inputs; ///< On the plan's device, in order.
  std::vector<int32_t> outputs;
  std::vector<int32_t> remade; ///< Of `outputs`: those that are dropped from this op on.
  std::vector<int32_t> drops;
  std::vector<int32_t> drops_again; ///< Of `drops`: those that a later op of the cycle drops, too.
  std::vector<int32_t> pageouts;
  std::vector<int32_t> prefetches;
  size_t room_bytes = 0; ///< Before it: see Note [Copies out that have not ended].
  bool binds = false; ///< Whether any of its storages is named by an action.
};

/// See Note [Placeholders].
struct PlannedBlock {
  size_t nbytes = 0;
  int32_t since = 0; ///< The first place at which it is held.
  int32_t until = 0; ///< The op that takes it.
};

struct CompiledPlan {
  std::string signature; ///< Names it to who asks.
  bool timed = false; ///< Whether its ops' times are of a program that follows a plan.
  c10::Device device{c10::kCPU};
  /// That copies in keep to; the device's may be more. `SIZE_MAX`: only to that.
  size_t limit_bytes = SIZE_MAX;
  std::vector<bool> recurring; ///< By number: whether it is the same one in every cycle.
  std::vector<PlannedOp> ops;
  std::vector<PlannedBlock> placeholders;
};

/// Whether both cycles begin alike; nobody can tell them apart then.
inline bool begin_alike(const CompiledPlan& one, const CompiledPlan& other) {
  const size_t count = std::min<size_t>({16, one.ops.size(), other.ops.size()});
  return std::equal(
      one.ops.begin(),
      one.ops.begin() + static_cast<std::ptrdiff_t>(count),
      other.ops.begin(),
      [](const PlannedOp& a, const PlannedOp& b) { return a.key == b.key; });
}

} // namespace torch_lms
