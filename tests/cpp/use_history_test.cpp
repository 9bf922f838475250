#include <extension/trace/UseHistory.h>
#include <extension/trace/Uses.h>

#include <random>
#include <vector>

#include "harness.h"

namespace torch_lms {
namespace {

constexpr uint64_t kUnknown = UseHistory::kUnknown;

CycleShape cycle(uint64_t number, uint64_t began, uint64_t forward = 500, uint64_t length = 1500) {
  CycleShape shape;
  shape.number = number;
  shape.began = began;
  shape.forward = forward;
  shape.length = length;
  return shape;
}

const CycleShape kNoCycle;

UseHistory used_at(const std::vector<uint64_t>& uses, const CycleShape& shape) {
  UseHistory history;
  for (uint64_t use : uses) {
    history.record(use, shape);
  }
  return history;
}

// --- what is noted late ---------------------------------------------------------------------

TEST(uses_that_follow_closely_are_no_others_when_somebody_asks) {
  std::mt19937 random(7);
  for (const uint64_t length : {0, 100, 3000}) {
    Uses uses;
    UseHistory at_once;
    CycleShape shape = cycle(1, 1, length / 3, length);
    uint64_t now = 1;
    for (int i = 0; i < 20000; ++i) {
      now += 1 + (random() % 3 != 0 ? random() % 6 : random() % 200);
      if (random() % 50 == 0) { // another cycle, or the one after that
        now += 3000;
        shape = cycle(shape.number + 1 + random() % 2, now, length / 3, length);
      }
      uses.record(now, shape);
      at_once.record(now, shape);
      if (random() % 4 == 0) {
        const UseHistory late = uses.history();
        const uint64_t later = now + random() % 100;
        CHECK(uses.last() == now);
        CHECK(late.next(later, shape) == at_once.next(later, shape));
        CHECK(late.recurs(shape) == at_once.recurs(shape));
      }
    }
  }
}

// --- without cycles ----------------------------------------------------------------------

TEST(of_an_entity_that_was_used_once_nothing_is_known) {
  const UseHistory history = used_at({100}, kNoCycle);
  CHECK(history.next(100, kNoCycle) > kUnknown / 2);
}

TEST(the_unknown_are_expected_the_later_the_longer_they_were_not_used) {
  const UseHistory old = used_at({100}, kNoCycle);
  const UseHistory recent = used_at({900}, kNoCycle);
  CHECK(old.next(1000, kNoCycle) > recent.next(1000, kNoCycle));
}

TEST(the_interval_between_the_last_two_uses_is_expected_again) {
  const UseHistory history = used_at({100, 300}, kNoCycle);
  CHECK_EQ(history.next(300, kNoCycle), 500);
  CHECK_EQ(history.next(499, kNoCycle), 500);
}

TEST(an_interval_that_has_passed_says_nothing_any_more) {
  const UseHistory history = used_at({100, 300}, kNoCycle);
  CHECK(history.next(500, kNoCycle) > kUnknown / 2);
  CHECK(history.next(9000, kNoCycle) > kUnknown / 2);
}

TEST(many_uses_of_one_op_are_one_place) {
  const UseHistory history = used_at({100, 300, 302, 306, 309}, kNoCycle);
  CHECK_EQ(history.next(309, kNoCycle), 309 + (309 - 100));
}

TEST(uses_that_follow_each_other_slowly_are_places_of_their_own) {
  const UseHistory history = used_at({100, 105}, kNoCycle); // 4 apart are one place
  CHECK_EQ(history.next(105, kNoCycle), 110);
}

TEST(an_interval_is_followed_by_what_followed_it_before) {
  const std::vector<uint64_t> passes = {100, 110, 130, 1100, 1110, 1130}; // of 1000 ops
  UseHistory history = used_at(passes, kNoCycle);
  CHECK_EQ(history.next(1130, kNoCycle), 2100);
  history.record(2100, kNoCycle);
  CHECK_EQ(history.next(2100, kNoCycle), 2110);
  history.record(2110, kNoCycle);
  CHECK_EQ(history.next(2110, kNoCycle), 2130);
}

TEST(of_intervals_before_the_one_that_is_most_like_the_latest_counts) {
  const UseHistory history = used_at({100, 108, 120, 1100, 1108, 1120}, kNoCycle);
  CHECK_EQ(history.next(1120, kNoCycle), 1120 + 980);
}

TEST(an_interval_that_has_come_twice_may_be_late) {
  const UseHistory history = used_at({1000, 2000, 3000}, kNoCycle);
  CHECK_EQ(history.next(3999, kNoCycle), 4000);
  CHECK_EQ(history.next(4000, kNoCycle), 4001); // a pass with an op more
  CHECK_EQ(history.next(4249, kNoCycle), 4250);
  CHECK(history.next(4250, kNoCycle) > kUnknown / 2);
}

TEST(intervals_are_known_however_long_ago_the_first_was) {
  std::vector<uint64_t> uses;
  for (uint64_t pass = 0; pass < 50; ++pass) {
    uses.push_back(1000 * pass + 10);
    uses.push_back(1000 * pass + 900);
  }
  const UseHistory history = used_at(uses, kNoCycle);
  CHECK_EQ(history.next(49900, kNoCycle), 50010);
}

// --- with cycles -------------------------------------------------------------------------

TEST(what_was_used_in_the_cycle_before_is_expected_at_the_same_places) {
  UseHistory history = used_at({1100, 2000}, cycle(1, 1000));
  CHECK_EQ(history.next(2500, cycle(2, 2500)), 2600);
  history.record(2600, cycle(2, 2500));
  CHECK_EQ(history.next(2600, cycle(2, 2500)), 3500);
  history.record(3500, cycle(2, 2500));
  CHECK_EQ(history.next(3500, cycle(2, 2500)), 2500 + 1500 + 100); // in the next cycle
}

TEST(only_what_was_used_in_two_cycles_running_recurs) {
  UseHistory history = used_at({1100}, cycle(1, 1000));
  CHECK(!history.recurs(cycle(1, 1000)));
  CHECK(history.recurs(cycle(2, 2500)));
  CHECK(!history.recurs(cycle(3, 4000)));
  history.record(2600, cycle(2, 2500));
  CHECK(history.recurs(cycle(2, 2500)));
  history.record(5600, cycle(4, 5500)); // one left out
  CHECK(!history.recurs(cycle(4, 5500)));
}

TEST(what_was_not_used_in_the_cycle_before_is_unknown) {
  const UseHistory history = used_at({1100}, cycle(1, 1000));
  CHECK(history.next(4100, cycle(3, 4000)) > kUnknown / 2);
}

TEST(what_is_new_in_forward_is_expected_in_backward_in_reverse) {
  const CycleShape shape = cycle(3, 3000); // 500 uses forward, 1000 after it
  const uint64_t first = used_at({3100}, shape).next(3300, shape);
  const uint64_t second = used_at({3200}, shape).next(3300, shape);
  CHECK_EQ(first, 3000 + 500 + 800);
  CHECK_EQ(second, 3000 + 500 + 600);
  CHECK(second < first);
}

TEST(what_is_new_in_backward_is_expected_in_the_next_cycle) {
  const CycleShape shape = cycle(3, 3000);
  CHECK_EQ(used_at({3700}, shape).next(3800, shape), 3000 + 1500 + 700);
}

TEST(a_cycle_without_a_forward_expects_everything_in_the_next_one) {
  const CycleShape shape = cycle(3, 3000, 0);
  CHECK_EQ(used_at({3100}, shape).next(3200, shape), 3000 + 1500 + 100);
}

TEST(long_cycles_have_wide_places) {
  const CycleShape before = cycle(1, 0, 5000, 12800); // 12800 / 128 = 100 are one place
  const CycleShape now = cycle(2, 12800, 5000, 12800);
  const UseHistory one = used_at({1000, 1100}, before);
  CHECK_EQ(one.next(12800, now), 12800 + 1100);
  CHECK_EQ(one.next(12800 + 1100, now), 12800 + 12800 + 1100);
  const UseHistory two = used_at({1000, 1101}, before);
  CHECK_EQ(two.next(12800, now), 12800 + 1000);
  CHECK_EQ(two.next(12800 + 1000, now), 12800 + 1101);
}

TEST(more_places_than_are_kept_do_no_harm) {
  std::vector<uint64_t> uses;
  for (uint64_t i = 0; i < 20; ++i) {
    uses.push_back(1000 + 20 * i);
  }
  const UseHistory history = used_at(uses, cycle(1, 1000));
  for (uint64_t i = 0; i < 6; ++i) {
    CHECK_EQ(history.next(2499 + 20 * i, cycle(2, 2500)), 2500 + 20 * i);
  }
  CHECK_EQ(history.next(2600, cycle(2, 2500)), 4000);
}

TEST(the_next_use_is_always_to_come) {
  const CycleShape before = cycle(1, 1000);
  const CycleShape now = cycle(2, 2500);
  const uint64_t late = 2500 + 3000;
  CHECK(used_at({1100}, before).next(late, now) > late);
  CHECK(used_at({2600}, now).next(late, now) > late);
  CHECK(used_at({3700}, now).next(late, now) > late);
}

} // namespace
} // namespace torch_lms
