#include <extension/trace/UseHistory.h>

#include <algorithm>

namespace torch_lms {
namespace {

constexpr uint64_t kLeastGap = 4;
constexpr uint64_t kGapsInCycle = 128;
constexpr uint64_t kLatenessInCycle = 4;

/// What was expected before `now` and has not come yet is due, or, if it is very late,
/// expected in a later cycle.
uint64_t to_come(uint64_t expected, uint64_t now, const CycleShape& cycle) {
  if (expected > now) {
    return expected;
  }
  const uint64_t late = now - expected;
  return late < cycle.length / kLatenessInCycle
             ? now + 1
             : expected + (late / cycle.length + 1) * cycle.length;
}

} // namespace

void UseHistory::record(uint64_t use, const CycleShape& cycle) noexcept {
  if (cycle.number != cycle_) {
    before_ = cycle.number == cycle_ + 1 ? present_ : Places();
    present_ = Places();
    cycle_ = cycle.number;
  }
  // A layer is several ops: they are one place.
  const bool same_place =
      present_.count != 0 && use - last_ <= std::max(kLeastGap, cycle.length / kGapsInCycle);
  if (!same_place) {
    last_but_one_ = last_;
  }
  last_ = use;
  if (same_place) {
    present_.at[present_.count - 1] = use - cycle.began;
  } else if (present_.count < present_.at.size()) {
    present_.at[present_.count++] = use - cycle.began;
  }
}

bool UseHistory::recurs(const CycleShape& cycle) const noexcept {
  return cycle_ == cycle.number ? before_.count != 0
                                : cycle_ + 1 == cycle.number && present_.count != 0;
}

uint64_t UseHistory::next(uint64_t now, const CycleShape& cycle) const noexcept {
  if (cycle.length == 0) {
    const bool repeats = last_but_one_ != 0 && last_ + (last_ - last_but_one_) > now;
    return repeats ? last_ + (last_ - last_but_one_) : kUnknown - last_;
  }
  if (recurs(cycle)) {
    const Places& places = cycle_ == cycle.number ? before_ : present_;
    for (size_t i = 0; i < places.count; ++i) {
      if (cycle.began + places.at[i] > now) {
        return cycle.began + places.at[i];
      }
    }
    return to_come(cycle.began + cycle.length + places.at[0], now, cycle);
  }
  if (cycle_ != cycle.number) {
    return kUnknown - last_; // not used in the cycle before either
  }
  const uint64_t place = last_ - cycle.began;
  if (place >= cycle.forward || cycle.forward == 0) {
    return to_come(cycle.began + cycle.length + place, now, cycle);
  }
  const uint64_t backward = cycle.length - cycle.forward;
  const uint64_t expected =
      cycle.began + cycle.forward + (cycle.forward - place) * backward / cycle.forward;
  return to_come(expected, now, cycle);
}

} // namespace torch_lms
