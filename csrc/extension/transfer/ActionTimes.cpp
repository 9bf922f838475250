#include <extension/transfer/ActionTimes.h>

namespace torch_lms {
namespace {

thread_local ActionTimes::Timer* innermost = nullptr;

} // namespace

void ActionTimes::begin() noexcept {
  for (Total& total : totals_) {
    total.count.store(0, std::memory_order_relaxed);
    total.spent_ns.store(0, std::memory_order_relaxed);
  }
  on_.store(true, std::memory_order_relaxed);
}

std::chrono::nanoseconds ActionTimes::spent() const noexcept {
  int64_t all_ns = 0;
  for (const Total& total : totals_) {
    all_ns += total.spent_ns.load(std::memory_order_relaxed);
  }
  return std::chrono::nanoseconds(all_ns);
}

double ActionTimes::mean_us(Action action) const noexcept {
  const Total& total = totals_[static_cast<size_t>(action)];
  const int64_t count = total.count.load(std::memory_order_relaxed);
  const auto spent_ns = static_cast<double>(total.spent_ns.load(std::memory_order_relaxed));
  return count == 0 ? 0 : spent_ns / 1e3 / static_cast<double>(count);
}

void ActionTimes::note_wait(std::chrono::nanoseconds waited) noexcept {
  if (innermost != nullptr) {
    innermost->others_ += waited;
  }
}

ActionTimes::Timer::Timer(ActionTimes& times, Action action) noexcept
    : times_(times.on_.load(std::memory_order_relaxed) ? &times : nullptr), action_(action) {
  if (times_ != nullptr) {
    outer_ = innermost;
    innermost = this;
    began_ = Clock::now();
  }
}

ActionTimes::Timer::~Timer() {
  if (times_ == nullptr) {
    return;
  }
  const std::chrono::nanoseconds passed = Clock::now() - began_;
  innermost = outer_;
  if (outer_ != nullptr) {
    outer_->others_ += passed;
  }
  Total& total = times_->totals_[static_cast<size_t>(action_)];
  total.spent_ns.fetch_add((passed - others_).count(), std::memory_order_relaxed);
  total.count.fetch_add(counts_ ? 1 : 0, std::memory_order_relaxed);
}

} // namespace torch_lms
