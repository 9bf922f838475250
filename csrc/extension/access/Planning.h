#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include <ATen/record_function.h>

#include <extension/access/DropsOnDemand.h>
#include <extension/access/Executor.h>
#include <extension/access/OpTimes.h>
#include <extension/access/PlanContest.h>
#include <extension/access/Recorder.h>
#include <extension/access/StepMeter.h>
#include <extension/base/SpinLock.h>
#include <extension/trace/CycleFinder.h>

namespace torch_lms {

/// Note [From a recording to a plan]
/// While a limit is armed, one whole cycle of the program is recorded. The recording goes to
/// Python, which makes a plan of it beside the program, on another process; paging on demand serves
/// meanwhile. The plan is carried out from the cycle on that begins after it has come.
///
/// A device that waits for memory most of the time runs at a higher clock than one that is busy. So
/// ops are timed again in a cycle that follows the plan, and the plan is made anew with these
/// times.

/// What the ops of a plan have taken while it was carried out.
struct PlanTimes {
  std::string signature; ///< Of the plan; empty for none.
  CycleTimes cycle;
  double pageout_us = 0; ///< Of the host's time, for each; 0 if there was none.
  double pagein_us = 0;
  double recompute_us = 0;
};

/// When cycles are recorded, and plans carried out.
///
/// Thread-safe: every method may be called from any thread. Ops cost one atomic load while nothing
/// is planned.
class Planning final : public PolicyListener {
 public:
  Planning(Pager& pager, Policy& policy, Recipes& recipes)
      : pager_(pager),
        policy_(policy),
        recorder_(pager, recipes, audition_),
        executor_(pager, policy, recipes, audition_),
        drops_(pager, recipes, audition_),
        times_(&pager.action_times()) {}

  /// From now on the program on `device` is recorded and planned, and on no other. `may_drop`: also
  /// before there is a plan, see Note [A host that fills].
  void enable(Device& device, bool may_drop);
  void disable();

  bool wants_ops() const noexcept {
    return recorder_.recording() || executor_.active() || drops_.on();
  }
  bool recording() const noexcept {
    return recorder_.recording();
  }
  /// See Note [Copies out that have not ended].
  bool is_crowded() const noexcept {
    return executor_.is_crowded();
  }
  void wait_for_pageouts() {
    executor_.wait_for_pageouts();
  }
  Prefetches& prefetches() noexcept {
    return executor_.prefetches();
  }
  /// `of_program`: on the thread of the program that is planned.
  void begin_op(const at::RecordFunction& record, Frame& frame, bool of_program);
  void end_op(const at::RecordFunction& record, Frame& frame);
  void after_op(Frame& frame) {
    if (executor_.active()) {
      follow_plan(frame);
    }
  }
  void note_raw_access(const EntityPtr& entity) {
    if (recorder_.recording()) {
      recorder_.note_raw_access(entity);
    }
  }
  /// An op of the program's is over: cycles are found by them (Note [Cycles]).
  void note_op(const at::RecordFunction& record) {
    if (device_.load(std::memory_order_relaxed) != nullptr) {
      look_for_cycle(record.name());
    }
  }

  // --- PolicyListener; what an op waits for is no time of its own ---
  void backward_ended() override;
  void host_fills() override {
    drops_.begin();
  }
  bool drop(const EntityPtr& entity) override {
    return drops_.drop(entity);
  }
  void wait_begins(Device& device) override {
    if (recorder_.recording()) {
      recorder_.pause(device);
    } else if (times_.on()) {
      times_.pause(device);
    }
  }
  void wait_ends(Device& device) noexcept override {
    if (recorder_.recording()) {
      recorder_.resume(device);
    } else if (times_.on()) {
      times_.resume(device);
    }
  }

  /// The latest recording, once; null if there is none.
  std::unique_ptr<RecordedCycle> take_recording();
  /// The latest times of a plan, once.
  PlanTimes take_times();
  void add(std::shared_ptr<const CompiledPlan> plan);
  /// None could be made of the latest recording. The program may become another: it is recorded
  /// once more after two cycles, and then after twice as many each time.
  void no_plan();
  /// The plan that has been carried out last, and what its cycles took.
  MeasuredPlan measured() const {
    return meter_.measured();
  }
  /// Whether a plan is followed that stays: its ops' times are those of such a program, and on a
  /// device with a clock of its own it has been compared (Note [What takes least is kept]).
  bool follows_timed_plan();
  /// Whether every plan has made way for paging on demand.
  bool on_demand() {
    std::lock_guard<std::mutex> lock(mutex_);
    return on_demand_;
  }
  double share_in_step() const noexcept {
    return executor_.share_in_step();
  }

 private:
  void follow_plan(Frame& frame);
  void look_for_cycle(const char* name);
  void end_cycle();
  void end_recording();
  void compare(
      Device& device,
      const std::shared_ptr<const CompiledPlan>& followed,
      double cycle_us);
  void try_without_limit(const std::shared_ptr<const CompiledPlan>& followed);
  void time_ops(Device& device, const std::shared_ptr<const CompiledPlan>& followed);
  size_t held_bytes() const;

  Pager& pager_;
  Policy& policy_;
  Audition audition_;
  Recorder recorder_;
  Executor executor_;
  DropsOnDemand drops_;
  StepMeter meter_;
  PlanContest contest_;
  OpTimes times_; // of a cycle that follows a plan
  std::atomic<Device*> device_{nullptr};
  std::mutex mutex_; // guards what follows
  std::unique_ptr<RecordedCycle> recording_;
  PlanTimes plan_times_;
  std::shared_ptr<const CompiledPlan> settling_; // the plan that the latest cycles have followed
  size_t settled_cycles_ = 0;
  std::set<std::string> timed_; // signatures of plans that have been made again, or could not be
  size_t segments_ = 0; // in a cycle
  bool waiting_ = false; // for the plan of a recording
  size_t failures_ = 0; // recordings in a row that no plan was made of
  size_t resting_cycles_ = 0; // until the next recording
  bool on_demand_ = false;
  SpinLock finding_; // guards what follows; taken by every op, after the mutex where both are
  CycleFinder finder_;
};

} // namespace torch_lms
