#include <extension/access/PlanContest.h>

#include <extension/base/Median.h>

namespace torch_lms {

PlanContest::Verdict PlanContest::end_cycle(const Plan& followed, double cycle_us) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (followed != current_) {
    current_ = followed;
    cycles_us_.clear();
  }
  if (cycles_us_.size() == kMostCycles) {
    cycles_us_.erase(cycles_us_.begin());
  }
  cycles_us_.push_back(cycle_us);
  if (followed == nullptr) {
    if (!planned_ && cycles_us_.size() >= kLeastOnDemand) {
      best_us_ = median_of(cycles_us_);
    }
    return {};
  }
  planned_ = true;
  if (followed == compared_ || cycles_us_.size() < kLeastPlanned) {
    return {};
  }
  compared_ = followed;
  const double taken_us = median_of(cycles_us_);
  if (followed != best_ && best_us_ > 0 && taken_us > kSlower * best_us_) {
    return {true, best_};
  }
  best_ = followed;
  best_us_ = taken_us;
  return {};
}

bool PlanContest::has_stayed(const Plan& plan) const {
  std::lock_guard<std::mutex> lock(mutex_);
  return plan != nullptr && plan == best_;
}

void PlanContest::clear() {
  std::lock_guard<std::mutex> lock(mutex_);
  current_ = compared_ = best_ = nullptr;
  cycles_us_.clear();
  best_us_ = 0;
  planned_ = false;
}

} // namespace torch_lms
