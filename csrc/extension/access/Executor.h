#pragma once

#include <atomic>
#include <bitset>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include <ATen/record_function.h>

#include <extension/access/Audition.h>
#include <extension/access/CompiledPlan.h>
#include <extension/access/Frame.h>
#include <extension/access/Prefetches.h>
#include <extension/access/Recipes.h>
#include <extension/policy/Policy.h>

namespace torch_lms {

/// Note [Plans and programs]
/// A plan's actions are keyed by places in the cycle. An op is at a place if its name and the sizes
/// of its storages are those of the recorded op; who comes out of step is found again nearby. What
/// the program does otherwise costs a page-in or a replay where a storage is needed that has gone,
/// or a page-out on demand where the limit is met. When more than one op in twenty has been out of
/// step for a few cycles, the program is recorded anew.
///
/// Programs whose cycles differ (an evaluation between steps, a shape that changes) have a plan for
/// each that has been recorded: the one whose first ops are the cycle's is carried out.

/// Note [Copies out that have not ended]
/// The host is ahead of the device, and what a copy out still reads is in use when it asks for more
/// memory. A plan says how much of that its peak leaves room for, at each op; more is waited for.
/// What is left below the limit is for free memory that lies in pieces.

/// Carries out plans.
///
/// Note [When copies in begin]
/// What an op uses last lives until the op has returned to its caller. So what is to come in after
/// an op takes its memory when the next op begins: before that, both would be there at once, where
/// a plan says that one takes the other's room.
///
/// Thread-safe: every method may be called from any thread. `after_op` drops and requests
/// page-outs, and none waits for anything but `wait_for_pageouts`; nothing is called under the
/// mutex but `Prefetches`.
class Executor {
 public:
  Executor(Pager& pager, Policy& policy, Recipes& recipes, Audition& audition)
      : pager_(pager),
        policy_(policy),
        recipes_(recipes),
        audition_(audition),
        prefetches_(pager) {}

  /// From the next cycle on; one that begins with the same ops goes.
  void add(std::shared_ptr<const CompiledPlan> plan);
  /// It is not carried out any more, from now on: the cycle that begins is that of a plan that has
  /// been added since, or else `instead`'s. Returns whether there is one.
  bool withdraw(
      const std::shared_ptr<const CompiledPlan>& plan,
      std::shared_ptr<const CompiledPlan> instead);
  void clear();

  /// Whether a plan is being carried out.
  bool active() const noexcept {
    return active_.load(std::memory_order_acquire);
  }

  /// Whether more is on its way out than the op that is expected next leaves room for. See Note
  /// [Copies out that have not ended].
  bool is_crowded() const noexcept {
    return pager_.out_queue().pending_bytes() > room_bytes_.load(std::memory_order_relaxed);
  }
  void wait_for_pageouts();

  /// What is to come in as soon as there is room. See Note [When copies in begin].
  Prefetches& prefetches() noexcept {
    return prefetches_;
  }

  /// An outermost op begins, and has pinned its inputs; ends; has let go of them.
  void begin_op(const at::RecordFunction& record, Frame& frame);
  void end_op(const at::RecordFunction& record, Frame& frame);
  void after_op(Frame& frame);

  /// A cycle has ended. Returns whether the program is to be recorded (again).
  bool end_cycle();

  /// Whether the program does something else for a while: paging ahead of need is better then.
  bool lost() const noexcept {
    return missed_.load(std::memory_order_relaxed) >= kMissesUntilLost;
  }

  /// Other cycles begin: the first that no plan fits is to be recorded.
  void doubt();

  /// The plan that the last whole cycle has followed; null if none.
  std::shared_ptr<const CompiledPlan> followed();

  /// Whether its limit alone has held back copies in, in that cycle.
  bool has_held_back() const noexcept {
    return held_back_.load(std::memory_order_relaxed);
  }

  /// Ops of the last whole cycle that were found in the plan, of all.
  double share_in_step() const noexcept {
    return share_.load(std::memory_order_relaxed);
  }

 private:
  static constexpr size_t kMissesUntilLost = 64;

  /// What stands for a number in this cycle.
  struct Bound {
    std::weak_ptr<Entity> entity;
    std::shared_ptr<OpRecipe> recipe;
    size_t output = 0;
  };

  struct Leaving {
    std::vector<Bound> drops;
    std::vector<EntityPtr> pageouts;
  };

  int32_t place_of_locked(uint64_t key, std::vector<Bound>* garbage);
  void bind_inputs_locked(const PlannedOp& op, Frame& frame, std::vector<Bound>* garbage);
  void bind_output(const std::shared_ptr<const CompiledPlan>& plan, int32_t number, Bound bound);
  Leaving leaving_after_locked(const PlannedOp& op);
  void take_plan_locked(std::shared_ptr<const CompiledPlan> plan);
  void start_cycle_locked(std::vector<Bound>& before);
  void expect_locked(size_t place);
  void hold_placeholders(int32_t place);

  Pager& pager_;
  Policy& policy_;
  Recipes& recipes_;
  Audition& audition_; // plans may be given, or fit another program
  Prefetches prefetches_;
  std::atomic<bool> active_{false};
  std::atomic<size_t> room_bytes_{SIZE_MAX}; // at the place that is expected
  std::atomic<double> share_{0};
  std::atomic<bool> held_back_{false};
  std::atomic<size_t> missed_{0}; // ops in a row that the plan does not know
  std::mutex mutex_; // guards what follows
  std::vector<std::shared_ptr<const CompiledPlan>> plans_;
  std::shared_ptr<const CompiledPlan> plan_; // of this cycle
  std::bitset<4096> keys_; // of its ops, by their remainders
  std::vector<Bound> bound_;
  std::vector<uint64_t> seen_; // keys of this cycle
  size_t next_ = 0; // the place that is expected
  size_t found_ = 0;
  int bad_cycles_ = 0;
  int32_t held_at_ = -1; // the place up to which `plan_`'s placeholders are held in this cycle
  std::shared_ptr<const CompiledPlan> followed_; // by the last cycle
};

} // namespace torch_lms
