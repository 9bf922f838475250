// What takes least is kept: plans, and paging on demand.

#include <extension/access/Executor.h>
#include <extension/access/PlanContest.h>

#include "rig.h"

namespace torch_lms {
namespace {

PlanContest::Plan a_plan() {
  return std::make_shared<const CompiledPlan>();
}

/// Cycles of one kind; the verdicts that were not to stay.
std::vector<PlanContest::Verdict> cycles(
    PlanContest& contest,
    const PlanContest::Plan& followed,
    double us,
    int count = 12) {
  std::vector<PlanContest::Verdict> found;
  for (int i = 0; i < count; ++i) {
    const auto verdict = contest.end_cycle(followed, us);
    if (verdict.makes_way) {
      found.push_back(verdict);
    }
  }
  return found;
}

/// After some cycles on demand, of 100 us each.
struct TwoPlans {
  TwoPlans() {
    CHECK(cycles(contest, nullptr, 100).empty());
  }

  PlanContest contest;
  const PlanContest::Plan first = a_plan();
  const PlanContest::Plan second = a_plan();
};

TEST(a_plan_that_is_faster_stays) {
  PlanContest contest;
  const auto plan = a_plan();
  CHECK(cycles(contest, nullptr, 100).empty());
  CHECK(cycles(contest, plan, 90).empty());
  CHECK(contest.has_stayed(plan));
  CHECK(!contest.has_stayed(nullptr));
}

TEST(a_plan_that_is_slower_than_paging_on_demand_makes_way_once) {
  PlanContest contest;
  const auto plan = a_plan();
  CHECK(cycles(contest, nullptr, 100, 2).empty());
  const auto verdicts = cycles(contest, plan, 110);
  CHECK_EQ(verdicts.size(), size_t{1});
  CHECK(verdicts.at(0).best == nullptr);
  CHECK(!contest.has_stayed(plan));
}

TEST(a_plan_that_was_made_again_makes_way_for_the_one_before) {
  TwoPlans two;
  CHECK(cycles(two.contest, two.first, 90).empty());
  const auto verdicts = cycles(two.contest, two.second, 95);
  CHECK_EQ(verdicts.size(), size_t{1});
  CHECK(verdicts.at(0).best == two.first);
  CHECK(two.contest.has_stayed(two.first));
}

/// One that keeps to its limit, and has stayed.
struct LimitedPlan {
  LimitedPlan() {
    cycles(contest, plan, 100);
    tried = contest.without_limit(plan);
    REQUIRE(tried != nullptr);
    CHECK_EQ(tried->limit_bytes, size_t{SIZE_MAX});
    CHECK(contest.without_limit(plan) == nullptr); // it is being tried
  }

  PlanContest contest;
  const PlanContest::Plan plan = [] {
    auto made = std::make_shared<CompiledPlan>();
    made->limit_bytes = 1;
    return made;
  }();
  PlanContest::Plan tried;
};

TEST(a_plan_that_is_faster_without_its_limit_stays_so) {
  LimitedPlan limited;
  CHECK(cycles(limited.contest, limited.tried, 98).empty());
  CHECK(limited.contest.has_stayed(limited.tried));
  CHECK(limited.contest.without_limit(limited.tried) == nullptr);
}

TEST(a_plan_that_is_no_faster_without_its_limit_keeps_to_it) {
  LimitedPlan limited;
  const auto verdicts = cycles(limited.contest, limited.tried, 99.5);
  CHECK_EQ(verdicts.size(), size_t{1});
  CHECK(verdicts.at(0).best == limited.plan);
  CHECK(cycles(limited.contest, limited.plan, 100).empty());
  CHECK(limited.contest.without_limit(limited.plan) == nullptr); // it has been tried
  CHECK(cycles(limited.contest, limited.plan, 120).empty()); // the program has more in use
  CHECK(limited.contest.without_limit(limited.plan) != nullptr);
}

TEST(a_plan_is_not_tried_without_its_limit_before_it_has_stayed) {
  LimitedPlan limited;
  const auto other = std::make_shared<CompiledPlan>(*limited.plan);
  cycles(limited.contest, other, 90, 3);
  CHECK(limited.contest.without_limit(other) == nullptr);
  CHECK(limited.contest.without_limit(nullptr) == nullptr);
  cycles(limited.contest, other, 90);
  CHECK(limited.contest.without_limit(other) != nullptr);
}

TEST(a_plan_does_not_make_way_for_itself) {
  PlanContest contest;
  const PlanContest::Plan first = a_plan();
  const PlanContest::Plan second = a_plan();
  cycles(contest, first, 100);
  const auto found = cycles(contest, second, 200);
  REQUIRE(found.size() == 1);
  CHECK(found[0].best == first);
  CHECK(cycles(contest, first, 150).empty()); // the machine has become slower
  CHECK(contest.has_stayed(first));
}

TEST(chance_decides_nothing) {
  PlanContest contest;
  const auto plan = a_plan();
  CHECK(cycles(contest, nullptr, 100).empty());
  CHECK(cycles(contest, plan, 300, 1).empty()); // the first one clears up
  CHECK(cycles(contest, plan, 101).empty());
  CHECK(contest.has_stayed(plan));
}

TEST(what_is_much_slower_makes_way_soon) {
  PlanContest contest;
  const auto plan = a_plan();
  CHECK(cycles(contest, nullptr, 100).empty());
  CHECK(cycles(contest, plan, 130, 2).empty());
  CHECK_EQ(cycles(contest, plan, 130, 1).size(), size_t{1});
  CHECK(cycles(contest, plan, 130).empty()); // once
}

TEST(what_was_much_slower_but_once_is_given_its_time) {
  PlanContest contest;
  const auto plan = a_plan();
  CHECK(cycles(contest, nullptr, 100).empty());
  CHECK(cycles(contest, plan, 130, 2).empty());
  CHECK(cycles(contest, plan, 95, 1).empty());
  CHECK(cycles(contest, plan, 130, 2).empty());
  CHECK_EQ(cycles(contest, plan, 130, 1).size(), size_t{1});
}

TEST(one_plan_alone_stays) {
  PlanContest contest;
  const auto plan = a_plan();
  CHECK(cycles(contest, nullptr, 100, 1).empty()); // too few to compare with
  CHECK(cycles(contest, plan, 1000).empty());
  CHECK(contest.has_stayed(plan));
}

TEST(programs_that_take_turns_are_not_compared) {
  PlanContest contest;
  const auto one = a_plan();
  const auto other = a_plan();
  for (int i = 0; i < 20; ++i) {
    CHECK(!contest.end_cycle(one, 10).makes_way);
    CHECK(!contest.end_cycle(other, 100).makes_way);
  }
}

TEST(a_plan_that_was_replaced_before_it_was_compared_is_not_lost) {
  TwoPlans two;
  CHECK(cycles(two.contest, two.first, 90, 3).empty());
  const auto verdicts = cycles(two.contest, two.second, 105);
  CHECK_EQ(verdicts.size(), size_t{1});
  CHECK(verdicts.at(0).best == two.first);
  CHECK(two.contest.has_stayed(two.first));
}

TEST(the_best_is_measured_for_as_long_as_it_is_followed) {
  PlanContest contest;
  const auto first = a_plan();
  const auto second = a_plan();
  CHECK(cycles(contest, first, 100, 6).empty()); // while it settles
  CHECK(cycles(contest, first, 90).empty());
  const auto verdicts = cycles(contest, second, 95);
  CHECK_EQ(verdicts.size(), size_t{1});
  CHECK(verdicts.at(0).best == first);
}

TEST(a_plan_that_was_replaced_at_once_is_no_measure) {
  TwoPlans two;
  CHECK(cycles(two.contest, two.first, 50, 2).empty());
  CHECK(cycles(two.contest, two.second, 90).empty());
  CHECK(two.contest.has_stayed(two.second));
}

TEST(a_plan_that_was_slower_and_replaced_does_not_come_back) {
  TwoPlans two;
  CHECK(cycles(two.contest, two.first, 110, 4).empty());
  const auto verdicts = cycles(two.contest, two.second, 105);
  CHECK_EQ(verdicts.size(), size_t{1});
  CHECK(verdicts.at(0).best == nullptr);
}

PlanContest::Plan plan_of(uint64_t key) {
  CompiledPlan plan;
  plan.ops.resize(1);
  plan.ops[0].key = key;
  return std::make_shared<const CompiledPlan>(plan);
}

TEST(another_programs_plan_is_no_measure) {
  PlanContest contest;
  const auto long_one = plan_of(1);
  const auto short_one = plan_of(2);
  CHECK(cycles(contest, nullptr, 110).empty());
  for (int i = 0; i < 3; ++i) {
    CHECK(cycles(contest, long_one, 100).empty());
    CHECK(cycles(contest, nullptr, 1, 3).empty()); // the short one, without a plan
    CHECK(cycles(contest, short_one, 10).empty());
  }
  CHECK_EQ(cycles(contest, plan_of(2), 20).size(), size_t{1});
}

TEST(the_cycle_after_a_plan_has_made_way_follows_the_other) {
  Audition audition;
  Executor executor(lms().pager, lms().policy, lms().recipes, audition);
  const PlanContest::Plan slow = plan_of(1);
  executor.add(slow);
  executor.end_cycle();
  CHECK(executor.active());
  CHECK(executor.withdraw(slow, plan_of(1)));
  CHECK(executor.active());
  CHECK(!executor.end_cycle()); // nothing is to be recorded
  CHECK(executor.withdraw(slow, nullptr));
  CHECK(executor.active()); // it has made way before
  executor.clear();
  executor.add(slow);
  executor.end_cycle();
  CHECK(!executor.withdraw(slow, nullptr));
  CHECK(!executor.active());
}

TEST(a_plan_that_came_while_another_made_way_has_its_turn) {
  Audition audition;
  Executor executor(lms().pager, lms().policy, lms().recipes, audition);
  const PlanContest::Plan slow = plan_of(1);
  const PlanContest::Plan newer = plan_of(1);
  executor.add(slow);
  executor.end_cycle();
  executor.add(newer);
  CHECK(executor.withdraw(slow, plan_of(1)));
  CHECK(executor.active());
  CHECK(!executor.withdraw(newer, nullptr)); // it was the only one
}

TEST(another_programs_plan_stands_in_for_none) {
  Audition audition;
  Executor executor(lms().pager, lms().policy, lms().recipes, audition);
  const PlanContest::Plan slow = plan_of(1);
  executor.add(plan_of(2));
  executor.add(slow);
  executor.end_cycle();
  CHECK(!executor.withdraw(slow, nullptr));
}

TEST(what_is_on_demand_after_a_plan_is_no_measure) {
  TwoPlans two;
  CHECK(cycles(two.contest, two.first, 90).empty());
  CHECK(cycles(two.contest, nullptr, 10).empty());
  CHECK(cycles(two.contest, two.second, 80).empty());
  CHECK(two.contest.has_stayed(two.second));
}

} // namespace
} // namespace torch_lms
