#include <extension/access/OpTimes.h>

#include <algorithm>
#include <exception>
#include <utility>

namespace torch_lms {

class OpTimes::Own {
 public:
  explicit Own(OpTimes& times) : times_(times) {}
  ~Own() {
    if (!times_.host_spans_.empty()) {
      times_.host_spans_.back().others += Clock::now() - std::max(began_, begin_of_last());
    }
  }
  Own(const Own&) = delete;
  Own& operator=(const Own&) = delete;

 private:
  Clock::time_point begin_of_last() const {
    return times_.host_spans_.back().begin;
  }

  OpTimes& times_;
  Clock::time_point began_ = Clock::now();
};

void OpTimes::begin(Device& device, Lead lead) {
  std::lock_guard<std::mutex> lock(mutex_);
  device_ = &device;
  lead_ = lead;
  wait_ = nullptr;
  waits_ = 0;
  paused_ = false;
  spans_.clear();
  host_spans_.clear();
  before_ = device.capturing() ? nullptr : device.mark_time();
  if (actions_ != nullptr) {
    actions_->begin();
  }
  on_.store(true, std::memory_order_release);
}

void OpTimes::abandon() {
  std::lock_guard<std::mutex> lock(mutex_);
  on_.store(false, std::memory_order_release);
  spans_.clear();
  host_spans_.clear();
  before_ = nullptr;
  wait_ = nullptr;
  if (actions_ != nullptr) {
    actions_->end();
  }
}

/// Under the mutex.
void OpTimes::close_host_span_locked(Clock::time_point now) {
  const auto acted = actions_ != nullptr ? actions_->spent() : std::chrono::nanoseconds(0);
  if (!host_spans_.empty()) {
    HostSpan& last = host_spans_.back();
    last.others += acted - acted_;
    if (waits_ != 0) {
      last.others += now - wait_began_;
      wait_began_ = now;
    }
  }
  acted_ = acted;
}

/// Under the mutex.
void OpTimes::open_host_span_locked(int32_t place, Clock::time_point now) {
  close_host_span_locked(now);
  const TimeMark* before = spans_.empty() ? before_.get() : spans_.back().end.get();
  host_spans_.push_back({place, before != nullptr && before->passed(), now, {}});
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
    const Own own(*this);
    open_host_span_locked(place, Clock::now());
    open_span_locked(place);
  }
}

void OpTimes::end_op(int32_t place) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (on() && !spans_.empty() && spans_.back().place == place) {
    const Own own(*this);
    spans_.back().end = device_->mark_time();
  }
}

void OpTimes::pause(Device& device) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!on() || device_ != &device || waits_++ != 0) {
    return;
  }
  wait_began_ = Clock::now();
  if (!spans_.empty() && spans_.back().end == nullptr) {
    spans_.back().end = device_->mark_time();
    paused_ = true;
  }
}

void OpTimes::resume(Device& device) noexcept {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!on() || device_ != &device || waits_ == 0 || --waits_ != 0) {
    return;
  }
  const auto waited = Clock::now() - wait_began_;
  ActionTimes::note_wait(waited);
  if (!host_spans_.empty()) {
    host_spans_.back().others += waited;
  }
  if (!std::exchange(paused_, false)) {
    return;
  }
  const Own own(*this);
  try {
    open_span_locked(spans_.back().place);
  } catch (const std::exception&) {
    on_.store(false, std::memory_order_release); // they would be wrong
  }
}

CycleTimes OpTimes::end(size_t places) {
  std::vector<Span> spans;
  CycleTimes found;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto now = Clock::now();
    close_host_span_locked(now);
    if (actions_ != nullptr) {
      actions_->end();
    }
    spans.swap(spans_);
    found.host_us.resize(places, 0);
    found.caught_up.resize(places, false);
    for (size_t i = 0; i < host_spans_.size(); ++i) {
      const HostSpan& span = host_spans_[i];
      const auto until = i + 1 < host_spans_.size() ? host_spans_[i + 1].begin : now;
      const auto at = static_cast<size_t>(span.place);
      if (at < places) {
        const std::chrono::duration<double, std::micro> own = until - span.begin - span.others;
        found.host_us[at] += std::max(0.0, own.count());
        found.caught_up[at] = span.caught_up;
      }
    }
    host_spans_.clear();
    before_ = nullptr;
    if (!on_.exchange(false, std::memory_order_acq_rel)) {
      return {};
    }
  }
  found.device_us.resize(places, 0);
  for (const Span& span : spans) {
    if (span.end != nullptr && static_cast<size_t>(span.place) < places) {
      found.device_us[static_cast<size_t>(span.place)] += span.end->us_since(*span.begin);
    }
  }
  return found;
}

} // namespace torch_lms
