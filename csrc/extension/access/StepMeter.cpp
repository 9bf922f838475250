#include <extension/access/StepMeter.h>

#include <algorithm>
#include <utility>

#include <extension/base/Median.h>

namespace torch_lms {

double StepMeter::end_cycle(
    const std::shared_ptr<const CompiledPlan>& followed,
    size_t peak_bytes,
    int64_t waited_us,
    Clock::time_point now) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto began = std::exchange(ended_, now);
  const int64_t waited_before_us = std::exchange(waited_us_, waited_us);
  if (began == Clock::time_point()) {
    return 0;
  }
  const double step_us = std::chrono::duration<double, std::micro>(now - began).count();
  if (followed == nullptr) {
    in_step_ = false;
    return step_us;
  }
  if (followed != plan_) {
    plan_ = followed;
    cycles_.clear();
    at_ = 0;
    in_step_ = false;
  }
  if (!std::exchange(in_step_, true)) {
    return step_us; // The first one still clears up after what was before.
  }
  const bool counted_anew = waited_us < waited_before_us; // somebody has reset the counters
  const int64_t wait_us = counted_anew ? waited_us : waited_us - waited_before_us;
  const Cycle cycle{step_us, peak_bytes, static_cast<double>(wait_us)};
  if (cycles_.size() < kMostCycles) {
    cycles_.push_back(cycle);
  } else {
    cycles_[at_++ % kMostCycles] = cycle;
  }
  return step_us;
}

void StepMeter::clear() {
  std::lock_guard<std::mutex> lock(mutex_);
  plan_ = nullptr;
  cycles_.clear();
  at_ = 0;
  in_step_ = false;
  ended_ = Clock::time_point();
  waited_us_ = 0;
}

MeasuredPlan StepMeter::measured() const {
  std::lock_guard<std::mutex> lock(mutex_);
  MeasuredPlan found;
  found.signature = plan_ != nullptr ? plan_->signature : std::string();
  std::vector<double> steps_us;
  std::vector<double> waits_us;
  for (const Cycle& cycle : cycles_) {
    steps_us.push_back(cycle.step_us);
    waits_us.push_back(cycle.wait_us);
    found.peak_bytes = std::max(found.peak_bytes, cycle.peak_bytes);
  }
  found.step_us = median_of(std::move(steps_us));
  found.wait_us = median_of(std::move(waits_us));
  return found;
}

} // namespace torch_lms
