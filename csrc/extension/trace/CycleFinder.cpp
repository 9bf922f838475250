#include <extension/trace/CycleFinder.h>

#include <algorithm>
#include <utility>

namespace torch_lms {
namespace {

/// Sums of what this returns differ where sums of what it is given would not.
uint64_t scattered(uint64_t bits) noexcept { // splitmix64's last step
  bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9;
  bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB;
  return bits ^ (bits >> 31);
}

} // namespace

bool CycleFinder::note_op(uint64_t name, uint64_t thread) {
  uint64_t& order = order_of(thread);
  order = scattered(order + name);
  ++ops_in_segment_;
  if (ops_in_last_segment_ != 0 && ops_in_segment_ < 4 * ops_in_last_segment_) {
    return false; // a backward may well end this
  }
  return note_name(name);
}

uint64_t& CycleFinder::order_of(uint64_t thread) {
  for (auto& order : orders_) {
    if (order.first == thread) {
      return order.second;
    }
  }
  orders_.emplace_back(thread, 0);
  return orders_.back().second;
}

uint64_t CycleFinder::names_in_segment() const noexcept {
  uint64_t names = 0;
  for (const auto& order : orders_) {
    names += order.second;
  }
  return names;
}

bool CycleFinder::end_segment(size_t held_bytes) {
  segments_.push_back(segment_that_ended(held_bytes));
  if (segments_.size() > 4 * kMostSegments) {
    segments_.pop_front();
  }
  orders_.clear();
  ops_in_segment_ = 0;
  repeats_ = false;
  too_short_ = 0;
  look_anew(kFewestNames);
  size_t period = find_period(&Segment::names);
  if (period == 0) {
    period = find_period(&Segment::taken_for);
  }
  certain_ = period != 0 || segments_.size() >= kMostUncertain;
  period = std::max<size_t>(period, 1);
  left_ = std::exchange(period_, period) != period ? until_end(period)
          : left_ == 0                             ? period - 1
                                                   : left_ - 1;
  return left_ == 0;
}

CycleFinder::Segment CycleFinder::segment_that_ended(size_t held_bytes) {
  // If something else was repeated in it, an evaluation, its end is taken for what was due.
  const bool due = repeats_ && period_ != 0;
  if (!due) {
    ops_in_last_segment_ = ops_in_segment_;
  }
  const uint64_t names = due ? segments_[segments_.size() - period_].names : names_in_segment();
  if (period_ <= 1) {
    in_order_ = 0;
    return {names, names, held_bytes};
  }
  const uint64_t expected = segments_[segments_.size() - period_].taken_for;
  if (names == expected) {
    in_order_ = std::min(in_order_ + 1, kMostTaken * period_);
    return {names, names, held_bytes};
  }
  if (in_order_ >= period_) {
    in_order_ -= period_;
    return {names, expected, held_bytes};
  }
  in_order_ = 0;
  for (Segment& segment : segments_) { // the program is another one
    segment.taken_for = segment.names;
  }
  return {names, names, held_bytes};
}

/// The one with which the latest segments are periodic longest; 0 where none is.
size_t CycleFinder::find_period(uint64_t Segment::* names) const {
  size_t best = 0;
  size_t longest = 0;
  const size_t count = segments_.size();
  for (size_t period = 1; period <= kMostSegments && 2 * period <= count; ++period) {
    size_t equal = 0;
    while (equal + period < count &&
           segments_[count - 1 - equal].*names == segments_[count - 1 - equal - period].*names) {
      ++equal;
    }
    if (equal >= period && equal + period > longest) {
      longest = equal + period;
      best = period;
    }
  }
  return best;
}

/// How many segments are to come, of a cycle of which the latest `period` have been all, in some
/// order, until it ends.
size_t CycleFinder::until_end(size_t period) const {
  const auto begin = segments_.end() - static_cast<std::ptrdiff_t>(period);
  const std::vector<Segment> cycle(begin, segments_.end());
  const auto holds_less = [](const Segment& one, const Segment& other) {
    return one.held_bytes < other.held_bytes;
  };
  const auto bounds = std::minmax_element(cycle.begin(), cycle.end(), holds_less);
  if (bounds.first->held_bytes < bounds.second->held_bytes / 20 * 19) {
    return static_cast<size_t>(bounds.first - cycle.begin() + 1) % period;
  }
  const auto rarity = [&](const Segment& segment) {
    return std::count_if(cycle.begin(), cycle.end(), [&](const Segment& other) {
      return other.names == segment.names;
    });
  };
  const auto rarest =
      std::min_element(cycle.begin(), cycle.end(), [&](const Segment& one, const Segment& other) {
        return rarity(one) < rarity(other);
      });
  return static_cast<size_t>(rarest - cycle.begin());
}

bool CycleFinder::note_name(uint64_t name) {
  if (repetition_ == 0) {
    return look_for_repetition(name);
  }
  ++held_;
  if (names_[at_] != name) {
    too_short_ = holds_ ? 0 : held_; // another program begins, or it was a loop within one
    look_anew(std::min(kMostNames, std::max(kFewestNames, 4 * too_short_)));
    return false;
  }
  at_ = (at_ + 1) % repetition_;
  return at_ == 0 && holds_on();
}

/// Longer than what has not, or for long.
bool CycleFinder::holds_on() {
  holds_ = holds_ || too_short_ != 0 || held_ >= kNamesToHold;
  repeats_ = repeats_ || holds_;
  return holds_;
}

bool CycleFinder::look_for_repetition(uint64_t name) {
  size_t border = borders_.empty() ? 0 : borders_.back();
  if (!names_.empty()) {
    while (border != 0 && names_[border] != name) {
      border = borders_[border - 1];
    }
    border += names_[border] == name ? 1 : 0;
  }
  names_.push_back(name);
  borders_.push_back(border);
  const size_t length = names_.size() - border;
  if (border >= length && names_.size() % length == 0 && length > too_short_) {
    repeat(length);
    return at_ == 0 && holds_on();
  }
  if (names_.size() == room_) { // what came first may never come again
    too_short_ = room_ == kMostNames ? 0 : too_short_;
    look_anew(room_ == kMostNames ? kFewestNames : 2 * room_);
  }
  return false;
}

/// As often as makes a cycle.
void CycleFinder::repeat(size_t length) {
  held_ = names_.size();
  repetition_ = (kFewestInCycle + length - 1) / length * length;
  at_ = held_ % repetition_;
  names_.reserve(repetition_);
  while (names_.size() < repetition_) {
    names_.push_back(names_[names_.size() - length]);
  }
}

void CycleFinder::look_anew(size_t room) {
  names_.clear();
  borders_.clear();
  room_ = room;
  repetition_ = 0;
  at_ = 0;
  holds_ = false;
}

} // namespace torch_lms
