#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <ATen/record_function.h>

#include <extension/access/Executor.h>
#include <extension/access/Recorder.h>
#include <extension/access/StepMeter.h>
#include <extension/trace/CycleFinder.h>

namespace torch_lms {

/// Note [From a recording to a plan]
/// While a limit is armed, one whole cycle of the program is recorded. The recording goes to
/// Python, which makes a plan of it beside the program, on another process; paging on demand serves
/// meanwhile. The plan is carried out from the cycle on that begins after it has come.

/// When cycles are recorded, and plans carried out.
///
/// Thread-safe: every method may be called from any thread. Ops cost one atomic load while nothing
/// is planned.
class Planning {
 public:
  Planning(Pager& pager, Policy& policy, Recipes& recipes)
      : pager_(pager),
        policy_(policy),
        recorder_(pager, recipes, audition_),
        executor_(pager, recipes, audition_) {}

  /// From now on the program on `device` is recorded and planned.
  void enable(Device& device);
  void disable();

  bool wants_ops() const noexcept {
    return recorder_.recording() || executor_.active();
  }
  bool recording() const noexcept {
    return recorder_.recording();
  }
  void begin_op(const at::RecordFunction& record, Frame& frame);
  void end_op(const at::RecordFunction& record, Frame& frame);
  void after_op(Frame& frame);
  void note_raw_access(const EntityPtr& entity) {
    if (recorder_.recording()) {
      recorder_.note_raw_access(entity);
    }
  }
  /// An op of the program's own threads is over: cycles are found by them (Note [Cycles]).
  void note_op(const at::RecordFunction& record, bool on_main_thread) {
    if (device_.load(std::memory_order_relaxed) != nullptr) {
      look_for_cycle(record, on_main_thread);
    }
  }
  void backward_ended();
  /// The op that runs waits for room: that is no time of its own.
  void wait_begins(Device& device) {
    if (recorder_.recording()) {
      recorder_.end_span(device);
    }
  }
  void wait_ends(Device& device) noexcept {
    if (recorder_.recording()) {
      recorder_.begin_span(device);
    }
  }

  /// The latest recording, once; null if there is none.
  std::unique_ptr<RecordedCycle> take_recording();
  void add(std::shared_ptr<const CompiledPlan> plan);
  /// The plan that has been carried out last, and what its cycles took.
  MeasuredPlan measured() const {
    return meter_.measured();
  }
  double share_in_step() const noexcept {
    return executor_.share_in_step();
  }

 private:
  void look_for_cycle(const at::RecordFunction& record, bool on_main_thread);
  void end_cycle();
  size_t held_bytes() const;

  Pager& pager_;
  Policy& policy_;
  Audition audition_;
  Recorder recorder_;
  Executor executor_;
  StepMeter meter_;
  std::atomic<Device*> device_{nullptr};
  std::mutex mutex_; // guards what follows
  std::unique_ptr<RecordedCycle> recording_;
  CycleFinder finder_;
  size_t segments_ = 0; // in a cycle
  bool waiting_ = false; // for the plan of a recording
};

} // namespace torch_lms
