#include <extension/access/PlanContest.h>

#include <algorithm>

#include <extension/base/Median.h>

namespace torch_lms {

PlanContest::Verdict PlanContest::end_cycle(const Plan& followed, double cycle_us) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (followed != current_) {
    change_to(followed);
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
  if (followed == compared_ && followed != best_) {
    return {};
  }
  const bool slower = followed != best_ && best_us_ > 0 && is_slower();
  if (!slower && cycles_us_.size() < kLeastPlanned) {
    return {};
  }
  compared_ = followed;
  if (slower) {
    return {true, best_};
  }
  best_ = followed;
  best_us_ = median_of(cycles_us_);
  return {};
}

/// Under the mutex.
void PlanContest::change_to(const Plan& followed) {
  const Plan& known = current_ != nullptr ? current_ : best_;
  if (followed != nullptr && known != nullptr && !begin_alike(*followed, *known)) {
    compared_ = best_ = nullptr;
    best_us_ = 0;
  } else if (current_ != nullptr && current_ != compared_ && cycles_us_.size() >= kLeastReplaced) {
    const double current_us = median_of(cycles_us_);
    if (best_us_ == 0 || current_us < best_us_) {
      best_ = current_;
      best_us_ = current_us;
    }
  }
  current_ = followed;
  cycles_us_.clear();
}

/// Than the best. Under the mutex.
bool PlanContest::is_slower() const {
  const size_t cycles = cycles_us_.size();
  const bool without_limit =
      best_ != nullptr && best_ == tried_ && current_->limit_bytes == SIZE_MAX;
  const double slower = without_limit ? kSlowerWithoutLimit : kSlower;
  return (cycles >= kLeastPlanned && median_of(cycles_us_) > slower * best_us_) ||
         (cycles >= kLeastMuchSlower &&
          *std::min_element(cycles_us_.begin(), cycles_us_.end()) > kMuchSlower * best_us_);
}

PlanContest::Plan PlanContest::without_limit(const Plan& followed) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (followed == nullptr || followed != best_ || followed->limit_bytes == SIZE_MAX ||
      (followed == tried_ && best_us_ < kMuchSlower * tried_us_)) {
    return nullptr;
  }
  tried_ = followed;
  tried_us_ = best_us_;
  auto plan = std::make_shared<CompiledPlan>(*followed);
  plan->limit_bytes = SIZE_MAX;
  return plan;
}

bool PlanContest::has_stayed(const Plan& plan) const {
  std::lock_guard<std::mutex> lock(mutex_);
  return plan != nullptr && plan == best_;
}

void PlanContest::clear() {
  std::lock_guard<std::mutex> lock(mutex_);
  current_ = compared_ = best_ = tried_ = nullptr;
  cycles_us_.clear();
  best_us_ = 0;
  planned_ = false;
}

} // namespace torch_lms
