#include <extension/access/OpTimes.h>

#include <exception>
#include <utility>

namespace torch_lms {

void OpTimes::begin(Device& device, Lead lead) {
  std::lock_guard<std::mutex> lock(mutex_);
  device_ = &device;
  lead_ = lead;
  wait_ = nullptr;
  waits_ = 0;
  paused_ = false;
  spans_.clear();
  on_.store(true, std::memory_order_release);
}

void OpTimes::abandon() {
  std::lock_guard<std::mutex> lock(mutex_);
  on_.store(false, std::memory_order_release);
  spans_.clear();
  wait_ = nullptr;
}

/// Under the mutex.
void OpTimes::keep_lead_locked() {
  const auto now = Clock::now();
  if (wait_ != nullptr && (now < enough_until_ || !wait_->passed())) {
    return;
  }
  wait_ = device_->mark_time();
  const auto waits = device_->let_host_lead();
  enough_until_ = now + waits / 2;
  if (waits.count() == 0) { // ops are over when they return
    lead_ = Lead::kThere;
  }
}

/// Under the mutex.
void OpTimes::open_span_locked(int32_t place) {
  if (device_->capturing()) { // nothing of ours may become a part of the graph
    on_.store(false, std::memory_order_release);
    return;
  }
  if (lead_ == Lead::kMade) {
    keep_lead_locked();
  }
  spans_.push_back({place, device_->mark_time(), nullptr});
}

void OpTimes::begin_op(int32_t place) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (on()) {
    open_span_locked(place);
  }
}

void OpTimes::end_op(int32_t place) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (on() && !spans_.empty() && spans_.back().place == place) {
    spans_.back().end = device_->mark_time();
  }
}

void OpTimes::pause(Device& device) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!on() || device_ != &device || waits_++ != 0) {
    return;
  }
  if (!spans_.empty() && spans_.back().end == nullptr) {
    spans_.back().end = device_->mark_time();
    paused_ = true;
  }
}

void OpTimes::resume(Device& device) noexcept {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!on() || device_ != &device || waits_ == 0 || --waits_ != 0 ||
      !std::exchange(paused_, false)) {
    return;
  }
  try {
    open_span_locked(spans_.back().place);
  } catch (const std::exception&) {
    on_.store(false, std::memory_order_release); // they would be wrong
  }
}

std::vector<double> OpTimes::end(size_t places) {
  std::vector<Span> spans;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    spans.swap(spans_);
    if (!on_.exchange(false, std::memory_order_acq_rel)) {
      return {};
    }
  }
  std::vector<double> times_us(places, 0);
  for (const Span& span : spans) {
    if (span.end != nullptr && static_cast<size_t>(span.place) < places) {
      times_us[static_cast<size_t>(span.place)] += span.end->us_since(*span.begin);
    }
  }
  return times_us;
}

} // namespace torch_lms
