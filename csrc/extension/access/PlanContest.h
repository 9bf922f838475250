#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

#include <extension/access/CompiledPlan.h>

namespace torch_lms {

/// Note [What takes least is kept]
/// A plan is made of ops' times that were taken in other circumstances than it makes, for a link
/// that may carry what no recording shows. So its prediction may be wrong, and a plan that is made
/// again may be slower than the one before. What has been measured decides: a plan that takes
/// longer than the best before it, or than paging on demand took before there was any, makes way:
/// after some cycles, or after a few that were all much slower. A plan may be replaced before it
/// has been compared: what its few cycles took counts all the same. The best one is measured for as
/// long as it is followed. Plans of another program, which begins with other ops, are no measure.
///
/// A plan that has stayed is tried without its limit where that has held copies in back: once, and
/// again when it has become much slower. That has to be faster by something, for it may need more
/// memory than is said.

/// Compares plans, and paging on demand, by what their cycles take.
///
/// Thread-safe: every method may be called from any thread.
class PlanContest {
 public:
  using Plan = std::shared_ptr<const CompiledPlan>;

  struct Verdict {
    bool makes_way = false; ///< The plan that is followed, for `best`.
    Plan best; ///< Null: paging on demand.
  };

  /// A cycle has ended, of the same kind as the one before. `followed`: null for paging on demand.
  Verdict end_cycle(const Plan& followed, double cycle_us);

  /// `followed` without its limit, if it is the best and is to be tried so; else null.
  Plan without_limit(const Plan& followed);

  /// Whether a plan has been compared, and has stayed.
  bool has_stayed(const Plan& plan) const;

  void clear();

 private:
  void change_to(const Plan& followed);
  bool is_slower() const;

  static constexpr size_t kLeastOnDemand = 2; // cycles; there may be no more while a plan is made
  static constexpr size_t kLeastPlanned = 6;
  static constexpr size_t kLeastReplaced = 3; // of a plan that another one has replaced
  static constexpr size_t kMostCycles = 8;
  static constexpr double kSlower = 1.02; // less may be chance
  static constexpr double kSlowerWithoutLimit = 0.99;
  static constexpr size_t kLeastMuchSlower = 3; // planned cycles, each of which is by more than
  static constexpr double kMuchSlower = 1.15;

  mutable std::mutex mutex_; // guards what follows
  Plan current_;
  std::vector<double> cycles_us_; // the latest of `current_`
  Plan compared_; // the latest
  Plan best_;
  Plan tried_; // without its limit: the latest
  double tried_us_ = 0; // what it took before that
  double best_us_ = 0; // 0: nothing has been measured
  bool planned_ = false; // a plan has been followed: what goes on demand now is out of the ordinary
};

} // namespace torch_lms
