#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace torch_lms {

/// How the latest whole cycle of a program (a forward, its backward and what comes
/// after, up to the end of the next backward) was divided, in outermost ops.
struct CycleShape {
  uint64_t began = 0; ///< The op at which the present cycle began.
  uint64_t number = 0; ///< Of the present cycle.
  uint64_t forward = 0; ///< Ops up to the start of backward.
  uint64_t length = 0; ///< All ops; 0 while no cycle is known.
};

/// When an entity was used, and from that, when it will be used next.
///
/// Note [The next use]
/// Programs that train repeat themselves. An entity that was used in the cycle before
/// (a parameter) is expected at the same places. One that is new in this cycle (an
/// activation) is expected in backward, whose order is forward's in reverse.
///
/// Without cycles (inference) what followed the interval between the last two uses before is
/// expected again: weights that two layers share, and a cache that is written and then read, have
/// several intervals in each pass. An interval that is new is expected once more. One that has come
/// before may be late (a pass may have an op more than the one before); what is later, and what was
/// used once, is unknown, and expected the later the longer it has not been used.
///
/// A wrong expectation costs time, never a result.
///
/// Not thread-safe: the entity's mutex guards it.
class UseHistory {
 public:
  static constexpr uint64_t kUnknown = uint64_t{1} << 62;
  /// Uses in one cycle that are no more ops apart than this are one place: a layer is several ops.
  static constexpr uint64_t kLeastGap = 4;

  /// The entity is used now, by the `use`-th outermost op.
  void record(uint64_t use, const CycleShape& cycle) noexcept;

  /// The last use that was recorded has gone on until `use`, in the same place.
  void extend(uint64_t use) noexcept;

  /// The op by which it is expected to be used next; after `now`, and more
  /// than `kUnknown` / 2 if nothing is known of it.
  uint64_t next(uint64_t now, const CycleShape& cycle) const noexcept;

  /// Whether it was used in the cycle before the present one (a parameter).
  bool recurs(const CycleShape& cycle) const noexcept;

 private:
  struct Places {
    std::array<uint64_t, 6> at{}; // relative to the start of the cycle
    size_t count = 0;
  };

  void record_latest(uint64_t use, bool same_place) noexcept;
  uint64_t next_without_cycles(uint64_t now) const noexcept;

  Places before_;
  Places present_;
  uint64_t cycle_ = 0;
  uint64_t began_ = 0; // that cycle
  uint64_t last_ = 0;
  std::array<uint64_t, 8> latest_{}; // places, the last one first: by their last uses
  size_t latest_count_ = 0;
};

} // namespace torch_lms
