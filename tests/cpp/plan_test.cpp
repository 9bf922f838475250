// What automatic mode reckons with: the plan of a cycle, and windows of free memory.

#include <extension/policy/FreeWindow.h>
#include <extension/policy/PageoutPlan.h>

#include <algorithm>
#include <random>
#include <vector>

#include "harness.h"

namespace torch_lms {
namespace {

constexpr size_t kImmovable = WindowBlock::kImmovable;

TEST(nothing_is_planned_before_a_cycle_has_ended) {
  PageoutPlan plan;
  plan.note_request(100);
  CHECK_EQ(plan.missing_bytes(), 0);
}

TEST(what_was_asked_for_in_a_cycle_is_planned_for_the_next) {
  PageoutPlan plan;
  plan.note_request(100);
  plan.note_request(50);
  plan.note_cancelled(30);
  plan.note_stays(1000);
  plan.end_cycle(1000);
  CHECK_EQ(plan.missing_bytes(), 120);
  plan.note_request(20);
  CHECK_EQ(plan.missing_bytes(), 100);
  plan.note_request(500);
  CHECK_EQ(plan.missing_bytes(), 0);
}

TEST(what_the_peak_left_unused_is_not_planned) {
  PageoutPlan plan;
  plan.note_request(100);
  plan.note_stays(920);
  plan.note_stays(700);
  plan.end_cycle(1000);
  CHECK_EQ(plan.missing_bytes(), 20);
  plan.note_request(20);
  plan.note_stays(10);
  plan.end_cycle(1000);
  CHECK_EQ(plan.missing_bytes(), 0);
}

TEST(more_may_be_called_off_than_was_asked_for) {
  PageoutPlan plan;
  plan.note_request(10);
  plan.note_cancelled(30);
  plan.note_request(5);
  plan.note_stays(1000);
  plan.end_cycle(1000);
  CHECK_EQ(plan.missing_bytes(), 5);
}

TEST(a_segment_without_room_has_no_window) {
  CHECK(shortest_windows({}, 1).empty());
  CHECK(shortest_windows({{10, 0}, {10, kImmovable}, {10, 0}}, 11).empty());
}

TEST(a_free_block_costs_nothing) {
  const std::vector<FreeWindow> windows = shortest_windows({{10, 10}, {10, 0}, {10, 10}}, 10);
  REQUIRE(windows.size() == 3);
  CHECK_EQ(windows[1].first, 1);
  CHECK_EQ(windows[1].last, 2);
  CHECK_EQ(windows[1].cost, 0);
}

/// Every window, one by one.
size_t least_cost(const std::vector<WindowBlock>& segment, size_t nbytes) {
  size_t least = SIZE_MAX;
  for (size_t first = 0; first < segment.size(); ++first) {
    size_t span = 0;
    size_t cost = 0;
    for (size_t last = first; last < segment.size(); ++last) {
      if (segment[last].cost == kImmovable) {
        break;
      }
      span += segment[last].nbytes;
      cost += segment[last].cost;
      least = span >= nbytes ? std::min(least, cost) : least;
    }
  }
  return least;
}

TEST(no_window_costs_less_than_the_one_that_is_found) {
  std::mt19937 random(1);
  for (int round = 0; round < 500; ++round) {
    std::vector<WindowBlock> segment;
    for (size_t i = random() % 12; i > 0; --i) {
      const size_t nbytes = 1 + random() % 8;
      const size_t kind = random() % 4;
      segment.push_back({nbytes, kind == 0 ? kImmovable : kind == 1 ? 0 : nbytes});
    }
    const size_t wanted = 1 + random() % 16;
    size_t least = SIZE_MAX;
    for (const FreeWindow& window : shortest_windows(segment, wanted)) {
      size_t span = 0;
      for (size_t i = window.first; i < window.last; ++i) {
        span += segment[i].nbytes;
      }
      CHECK(span >= wanted);
      CHECK(span - segment[window.first].nbytes < wanted);
      least = std::min(least, window.cost);
    }
    CHECK_EQ(least, least_cost(segment, wanted));
  }
}

} // namespace
} // namespace torch_lms
