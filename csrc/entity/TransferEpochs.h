#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>

namespace torch_lms {

/// Tells transfers that were asked for before a moment from later ones, in whatever order they end.
/// Each carries the epoch it was asked for in; who waits begins a new epoch, and waits for all
/// before it. Not thread-safe.
class TransferEpochs {
 public:
  /// The epoch of a transfer that is asked for now.
  uint64_t add() noexcept {
    ++unfinished_.back();
    return last();
  }

  /// A transfer of that epoch is over, or called off.
  void finish(uint64_t epoch) noexcept {
    --unfinished_[epoch - first_];
    while (unfinished_.size() > 1 && unfinished_.front() == 0) {
      unfinished_.pop_front();
      ++first_;
    }
  }

  /// An epoch that all transfers so far are before. Takes memory only where some are unfinished.
  uint64_t begin() {
    if (unfinished_.back() != 0) {
      unfinished_.push_back(0);
    }
    return last();
  }

  /// Whether all transfers before that epoch are over.
  bool over(uint64_t epoch) const noexcept {
    return first_ >= epoch;
  }

 private:
  uint64_t last() const noexcept {
    return first_ + unfinished_.size() - 1;
  }

  uint64_t first_ = 0;
  std::deque<size_t> unfinished_ = std::deque<size_t>(1); // of the epochs from `first_` on
};

} // namespace torch_lms
