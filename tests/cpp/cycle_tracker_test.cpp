#include <extension/trace/CycleTracker.h>

#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

#include "harness.h"

namespace torch_lms {
namespace {

void use(CycleTracker& tracker, int times) {
  for (int i = 0; i < times; ++i) {
    tracker.next_op();
  }
}

TEST(uses_are_counted_from_one) {
  CycleTracker tracker;
  CHECK_EQ(tracker.now(), 0);
  CHECK_EQ(tracker.next_op(), 1);
  CHECK_EQ(tracker.next_op(), 2);
  CHECK_EQ(tracker.now(), 2);
}

TEST(no_cycle_is_known_before_a_backward_has_ended) {
  CycleTracker tracker;
  CHECK(!tracker.note_phase(false));
  use(tracker, 10);
  CHECK(!tracker.note_phase(false));
  CHECK(!tracker.note_phase(true));
  use(tracker, 5);
  CHECK(!tracker.note_phase(true));
  CHECK_EQ(tracker.shape().length, 0);
  CHECK_EQ(tracker.shape().number, 0);
}

TEST(a_cycle_ends_when_something_else_begins_after_a_backward) {
  CycleTracker tracker;
  use(tracker, 10);
  tracker.note_phase(true);
  use(tracker, 20);
  CHECK(tracker.note_phase(false));
  CHECK(!tracker.note_phase(false));
  const CycleShape shape = tracker.shape();
  CHECK_EQ(shape.number, 1);
  CHECK_EQ(shape.began, 30);
  CHECK_EQ(shape.forward, 10);
  CHECK_EQ(shape.length, 30);
}

TEST(each_cycle_is_measured_anew) {
  CycleTracker tracker;
  for (int i = 1; i <= 4; ++i) {
    use(tracker, 3 * i); // the step of the optimizer and the next forward
    tracker.note_phase(true);
    use(tracker, 7 * i);
    CHECK(tracker.note_phase(false));
    CHECK_EQ(tracker.shape().number, i);
    CHECK_EQ(tracker.shape().forward, 3 * i);
    CHECK_EQ(tracker.shape().length, 10 * i);
    CHECK_EQ(tracker.shape().began, tracker.now());
  }
}

TEST(uses_of_several_threads_are_all_different) {
  CycleTracker tracker;
  std::vector<std::vector<uint64_t>> uses(4);
  std::vector<std::thread> threads;
  for (auto& own : uses) {
    threads.emplace_back([&tracker, &own] {
      for (int i = 0; i < 2000; ++i) {
        own.push_back(tracker.next_op());
      }
    });
  }
  std::vector<uint64_t> all;
  for (size_t i = 0; i < threads.size(); ++i) {
    threads[i].join();
    CHECK(std::is_sorted(uses[i].begin(), uses[i].end()));
    all.insert(all.end(), uses[i].begin(), uses[i].end());
  }
  std::sort(all.begin(), all.end());
  CHECK(std::adjacent_find(all.begin(), all.end()) == all.end());
  CHECK_EQ(all.back(), tracker.now());
  CHECK_EQ(all.size(), 8000);
}

TEST(a_phase_that_several_threads_note_ends_one_cycle) {
  CycleTracker tracker;
  constexpr int kThreads = 4;
  for (uint64_t round = 1; round <= 50; ++round) {
    use(tracker, 2);
    std::atomic<int> ended{0};
    for (bool backward : {true, false}) {
      std::vector<std::thread> threads;
      for (int t = 0; t < kThreads; ++t) {
        threads.emplace_back([&] {
          tracker.next_op();
          ended += tracker.note_phase(backward) ? 1 : 0;
        });
      }
      for (std::thread& thread : threads) {
        thread.join();
      }
    }
    CHECK_EQ(ended.load(), 1);
    CHECK_EQ(tracker.shape().number, round);
    CHECK(tracker.shape().forward <= tracker.shape().length);
    CHECK(tracker.shape().began <= tracker.now());
  }
}

TEST(a_forgotten_cycle_is_measured_from_then_on) {
  CycleTracker tracker;
  use(tracker, 10);
  tracker.note_phase(true);
  use(tracker, 20);
  REQUIRE(tracker.note_phase(false));
  use(tracker, 5);
  tracker.note_phase(true);
  tracker.forget(); // also that a backward was running
  CycleShape shape = tracker.shape();
  CHECK_EQ(shape.length, 0);
  CHECK_EQ(shape.forward, 0);
  CHECK_EQ(shape.began, 35);
  CHECK_EQ(shape.number, 2); // what was used in cycle 1 does not recur
  CHECK(!tracker.note_phase(false));
  use(tracker, 4);
  tracker.note_phase(true);
  use(tracker, 6);
  CHECK(tracker.note_phase(false));
  shape = tracker.shape();
  CHECK_EQ(shape.forward, 4);
  CHECK_EQ(shape.length, 10);
  CHECK_EQ(tracker.now(), 45); // time goes on
}

TEST(a_shape_that_is_read_while_cycles_end_is_one_cycles) {
  CycleTracker tracker;
  std::atomic<bool> over{false};
  std::thread reader([&] {
    while (!over) {
      const CycleShape shape = tracker.shape();
      CHECK_EQ(shape.length, shape.number == 0 ? 0 : 3 * shape.forward);
      CHECK_EQ(shape.forward, shape.number);
    }
  });
  for (int i = 1; i <= 300; ++i) {
    use(tracker, i);
    tracker.note_phase(true);
    use(tracker, 2 * i);
    tracker.note_phase(false);
  }
  over = true;
  reader.join();
}

} // namespace
} // namespace torch_lms
