#include <extension/access/Planning.h>

#include <algorithm>
#include <utility>

#include <extension/base/Backward.h>
#include <extension/base/Interpreter.h>

namespace torch_lms {

void Planning::enable(Device& device, bool may_drop) {
  if (device_.load() != &device) {
    disable(); // what is recorded is of another device
  }
  executor_.clear(); // of plans for another limit
  drops_.allow(may_drop);
  contest_.clear();
  {
    std::lock_guard<std::mutex> lock(mutex_);
    // What is being made of the latest recording is for the other limit, and is not added.
    recording_ = nullptr;
    waiting_ = false;
    failures_ = resting_cycles_ = 0;
    on_demand_ = false;
    timed_.clear();
  }
  device_.store(&device);
}

void Planning::disable() {
  {
    std::lock_guard<std::mutex> lock(mutex_); // nobody begins a recording for it any more
    device_.store(nullptr);
    recorder_.abandon();
  }
  executor_.clear();
  drops_.allow(false);
  meter_.clear();
  contest_.clear();
  times_.abandon();
  policy_.set_planned(false);
  std::lock_guard<std::mutex> lock(mutex_);
  recording_ = nullptr;
  plan_times_ = PlanTimes();
  settling_ = nullptr;
  settled_cycles_ = 0;
  segments_ = 0;
  waiting_ = false;
  failures_ = resting_cycles_ = 0;
  on_demand_ = false;
  timed_.clear();
  std::lock_guard<SpinLock> finding(finding_);
  finder_ = CycleFinder();
}

void Planning::begin_op(const at::RecordFunction& record, Frame& frame, bool of_program) {
  if (drops_.on()) {
    drops_.begin_op(record, frame);
  }
  if (!of_program) {
    return;
  }
  if (recorder_.recording()) {
    recorder_.begin_op(record, frame);
  } else {
    executor_.begin_op(record, frame);
    if (times_.on() && frame.place >= 0) {
      times_.begin_op(frame.place);
    }
  }
}

void Planning::end_op(const at::RecordFunction& record, Frame& frame) {
  if (recorder_.recording()) {
    recorder_.end_op(record, frame, in_backward());
  } else {
    if (times_.on() && frame.place >= 0) {
      times_.end_op(frame.place);
    }
    executor_.end_op(record, frame);
  }
  drops_.end_op(record, frame);
}

void Planning::follow_plan(Frame& frame) {
  executor_.after_op(frame);
  if (!recorder_.recording()) {
    policy_.set_planned(!executor_.lost());
  }
}

void Planning::look_for_cycle(const char* name) {
  bool ended = false;
  {
    std::lock_guard<SpinLock> finding(finding_);
    ended = finder_.note_op(reinterpret_cast<uintptr_t>(name), OpClock::this_thread());
  }
  if (ended) {
    end_cycle();
  }
}

void Planning::backward_ended() {
  bool ended = false;
  bool changed = false;
  bool first = false;
  const size_t held = held_bytes();
  {
    std::lock_guard<std::mutex> lock(mutex_);
    std::lock_guard<SpinLock> finding(finding_);
    ended = finder_.end_segment(held);
    const size_t before = std::exchange(segments_, finder_.segments());
    changed = before != segments_;
    first = before == 0; // what a long forward repeats has been taken for the cycle until now
    if (changed) {
      waiting_ = on_demand_ = false;
      failures_ = resting_cycles_ = 0;
    }
  }
  if (changed) { // what was recorded is no cycle any more, or only a part of one
    recorder_.abandon();
    contest_.clear();
    if (!first) { // else a plan that was given may well fit
      executor_.doubt();
    }
  }
  if (ended) {
    end_cycle();
  }
}

/// Where it lies does not matter.
size_t Planning::held_bytes() const {
  const Device* device = device_.load();
  return device == nullptr ? 0 : pager_.held_bytes(*device);
}

void Planning::end_cycle() {
  Device* device = device_.load();
  if (device == nullptr) {
    return;
  }
  const bool was_recorded = recorder_.recording();
  if (was_recorded) {
    end_recording();
  }
  const bool wanted = executor_.end_cycle();
  const std::shared_ptr<const CompiledPlan> followed = executor_.followed();
  if (followed != nullptr) {
    drops_.end(); // until the host fills all the same
  }
  const double cycle_us = meter_.end_cycle(
      followed,
      policy_.take_cycle_peak(*device),
      pager_.stats().wait_us.load(std::memory_order_relaxed),
      StepMeter::Clock::now());
  time_ops(*device, followed);
  if (!was_recorded && cycle_us > 0 && policy_.attention() == Attention::kArmed) {
    compare(*device, followed, cycle_us);
  }
  std::lock_guard<std::mutex> lock(mutex_);
  bool may_repeat = false;
  {
    std::lock_guard<SpinLock> finding(finding_);
    may_repeat = finder_.may_repeat();
  }
  const bool rests = resting_cycles_ > 0;
  resting_cycles_ -= rests ? 1 : 0;
  const bool records = wanted && may_repeat && !waiting_ && !rests && !on_demand_ &&
                       device_.load() == device && policy_.attention() == Attention::kArmed;
  policy_.set_planned(executor_.active() && !records);
  if (records) {
    recorder_.begin(*device, [this, device] { return policy_.take_recent_peak(*device); });
  }
}

/// A plan is asked for if the recording is certain to be what the program repeats.
void Planning::end_recording() {
  auto recorded = recorder_.end();
  {
    std::lock_guard<std::mutex> lock(mutex_);
    std::lock_guard<SpinLock> finding(finding_);
    if (recorded == nullptr || !(segments_ == 0 || finder_.certain())) {
      return;
    }
    recording_ = std::move(recorded);
    waiting_ = true;
  }
  if (interpreter().make_plan != nullptr) {
    interpreter().make_plan();
  }
}

/// Not on a processor: what it copies and plans takes the time of what it computes.
void Planning::compare(
    Device& device,
    const std::shared_ptr<const CompiledPlan>& followed,
    double cycle_us) {
  if (device.device().is_cpu()) {
    return;
  }
  const PlanContest::Verdict verdict = contest_.end_cycle(followed, cycle_us);
  if (!verdict.makes_way) {
    try_without_limit(followed);
    return;
  }
  const auto set_on_demand = [this](bool on_demand) {
    std::lock_guard<std::mutex> lock(mutex_);
    on_demand_ = on_demand;
  };
  set_on_demand(true); // before: a plan that is added meanwhile sets it back
  if (executor_.withdraw(followed, verdict.best)) {
    set_on_demand(false);
  }
}

/// See Note [A plan's room].
void Planning::try_without_limit(const std::shared_ptr<const CompiledPlan>& followed) {
  if (!executor_.has_held_back()) {
    return;
  }
  if (auto plan = contest_.without_limit(followed)) {
    executor_.withdraw(followed, std::move(plan));
  }
}

bool Planning::follows_timed_plan() {
  const auto followed = executor_.followed();
  if (followed == nullptr || followed->device.is_cpu()) {
    return followed != nullptr && followed->timed;
  }
  std::lock_guard<std::mutex> lock(mutex_);
  return contest_.has_stayed(followed) &&
         (followed->timed || timed_.count(followed->signature) > 0);
}

/// At the end of a cycle, once for a plan: when it has been followed for some cycles.
void Planning::time_ops(Device& device, const std::shared_ptr<const CompiledPlan>& followed) {
  constexpr size_t kCyclesToSettle = 3; // until the device is as busy, and as warm, as it will be
  const bool timed = times_.on();
  CycleTimes cycle = timed && followed != nullptr ? times_.end(followed->ops.size()) : CycleTimes();
  bool ready = false;
  bool begins = false;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    settled_cycles_ = followed != nullptr && followed == settling_ ? settled_cycles_ + 1 : 0;
    settling_ = followed;
    begins = followed != nullptr && !followed->timed && settled_cycles_ == kCyclesToSettle &&
             timed_.count(followed->signature) == 0;
    ready = timed && settled_cycles_ > kCyclesToSettle && !cycle.device_us.empty();
    if (ready) {
      timed_.insert(followed->signature);
      const ActionTimes& actions = pager_.action_times();
      plan_times_ = {
          followed->signature,
          std::move(cycle),
          actions.mean_us(Action::kPageout),
          actions.mean_us(Action::kPagein),
          actions.mean_us(Action::kRecompute)};
    }
  }
  if (ready && interpreter().make_plan != nullptr) {
    interpreter().make_plan();
  } else if (begins) {
    times_.begin(device, OpTimes::Lead::kThere);
  } else {
    times_.abandon();
  }
}

PlanTimes Planning::take_times() {
  std::lock_guard<std::mutex> lock(mutex_);
  return std::exchange(plan_times_, PlanTimes());
}

std::unique_ptr<RecordedCycle> Planning::take_recording() {
  std::lock_guard<std::mutex> lock(mutex_);
  return std::move(recording_);
}

void Planning::add(std::shared_ptr<const CompiledPlan> plan) {
  if (device_.load() != nullptr) {
    executor_.add(std::move(plan));
  }
  std::lock_guard<std::mutex> lock(mutex_);
  waiting_ = on_demand_ = false;
  failures_ = 0;
}

void Planning::no_plan() {
  constexpr size_t kMostDoublings = 10;
  std::lock_guard<std::mutex> lock(mutex_);
  waiting_ = false;
  failures_ = std::min(failures_ + 1, kMostDoublings);
  resting_cycles_ = size_t{1} << failures_;
}

} // namespace torch_lms
