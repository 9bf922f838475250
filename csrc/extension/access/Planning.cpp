#include <extension/access/Planning.h>

#include <utility>

#include <torch/csrc/autograd/graph_task.h>

#include <extension/base/Interpreter.h>

namespace torch_lms {

void Planning::enable(Device& device) {
  device_.store(&device);
}

void Planning::disable() {
  device_.store(nullptr);
  recorder_.abandon();
  executor_.clear();
  policy_.set_planned(false);
  std::lock_guard<std::mutex> lock(mutex_);
  recording_ = nullptr;
  waiting_ = false;
}

void Planning::begin_op(const at::RecordFunction& record, Frame& frame) {
  if (recorder_.recording()) {
    recorder_.begin_op(record, frame);
  } else {
    executor_.begin_op(record, frame);
  }
}

void Planning::end_op(const at::RecordFunction& record, Frame& frame) {
  if (recorder_.recording()) {
    recorder_.end_op(record, frame, torch::autograd::get_current_graph_task_id() != -1);
  } else {
    executor_.end_op(record, frame);
  }
}

void Planning::after_op(Frame& frame) {
  if (executor_.active()) {
    executor_.after_op(frame);
  }
}

void Planning::cycle_ended() {
  Device* device = device_.load();
  if (device == nullptr) {
    return;
  }
  if (recorder_.recording()) {
    if (auto recorded = recorder_.end()) {
      std::lock_guard<std::mutex> lock(mutex_);
      recording_ = std::move(recorded);
      waiting_ = true;
    }
    if (interpreter().make_plan != nullptr) {
      interpreter().make_plan();
    }
  }
  const bool wanted = executor_.end_cycle();
  std::lock_guard<std::mutex> lock(mutex_);
  const bool records = wanted && !waiting_ && policy_.attention() == Policy::Attention::kArmed;
  policy_.set_planned(executor_.active() || records); // what comes ahead of need would be counted
  if (records) {
    recorder_.begin(*device, [this, device] { return policy_.take_recent_peak(*device); });
  }
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
  waiting_ = false;
}

} // namespace torch_lms
