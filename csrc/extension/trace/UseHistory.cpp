#include <extension/trace/UseHistory.h>

#include <algorithm>

namespace torch_lms {
namespace {

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
  began_ = cycle.began;
  const bool same_place = present_.count != 0 &&
                          use - last_ <= std::max(uint64_t{kLeastGap}, cycle.length / kGapsInCycle);
  record_latest(use, same_place);
  last_ = use;
  if (same_place) {
    present_.at[present_.count - 1] = use - cycle.began;
  } else if (present_.count < present_.at.size()) {
    present_.at[present_.count++] = use - cycle.began;
  }
}

void UseHistory::extend(uint64_t use) noexcept {
  if (use <= last_ || present_.count == 0) {
    return;
  }
  last_ = use;
  latest_[0] = use;
  present_.at[present_.count - 1] = use - began_;
}

void UseHistory::record_latest(uint64_t use, bool same_place) noexcept {
  if (!same_place) {
    std::copy_backward(latest_.begin(), latest_.end() - 1, latest_.end());
    latest_count_ = std::min(latest_count_ + 1, latest_.size());
  }
  latest_[0] = use;
}

uint64_t UseHistory::next_without_cycles(uint64_t now) const noexcept {
  if (latest_count_ < 2) {
    return kUnknown - last_;
  }
  const auto interval = [this](size_t i) { return latest_[i] - latest_[i + 1]; };
  const uint64_t latest = interval(0);
  size_t before = 0; // where the one that is most like the latest came
  uint64_t difference = std::max(uint64_t{kLeastGap}, latest / kLatenessInCycle);
  for (size_t i = 1; i + 1 < latest_count_; ++i) {
    const uint64_t other = std::max(interval(i), latest) - std::min(interval(i), latest);
    if (other < difference) {
      before = i;
      difference = other;
    }
  }
  const bool repeats = before != 0;
  const uint64_t expected = last_ + (repeats ? interval(before - 1) : latest);
  if (expected > now) {
    return expected;
  }
  const uint64_t patience = repeats ? (expected - last_) / kLatenessInCycle : 0;
  return now - expected < patience ? now + 1 : kUnknown - last_;
}

bool UseHistory::recurs(const CycleShape& cycle) const noexcept {
  return cycle_ == cycle.number ? before_.count != 0
                                : cycle_ + 1 == cycle.number && present_.count != 0;
}

uint64_t UseHistory::next(uint64_t now, const CycleShape& cycle) const noexcept {
  if (cycle.length == 0) {
    return next_without_cycles(now);
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
