#pragma once

#include <atomic>
#include <cstdint>

namespace torch_lms {

/// Tells which ops were already running when an entity was first seen.
///
/// Note [Who may still use a storage]
/// An op pins the entities among its inputs before it runs, so a pinned entity
/// is never committed to the host. An op that began before an entity existed
/// pinned nothing. `OpClock` covers those: every thread publishes the tick at
/// which its outermost op began, an entity remembers the tick of its first
/// sighting, and a page-out is committed only when no op that began at or
/// before that tick is still running. The order of the accesses makes it safe:
/// an op publishes its tick (sequentially consistent) before it looks entities
/// up, and an entity is published before it takes its tick.
class OpClock {
 public:
  static OpClock& get();

  /// The outermost op of the calling thread begins. Thread-safe.
  void begin_op() noexcept;

  /// The outermost op of the calling thread has ended. Thread-safe.
  void end_op() noexcept;

  /// A new tick, later than that of every op that is running. Thread-safe.
  uint64_t tick() noexcept;

  /// Whether an op that began at or before `tick` is still running on a thread
  /// other than the calling one. Thread-safe.
  bool running_since(uint64_t tick) noexcept;

 private:
  OpClock() = default;
  // 0 is kept for "no op is running".
  std::atomic<uint64_t> now_{1};
};

} // namespace torch_lms
