#include <entity/OpClock.h>

#include <atomic>
#include <thread>
#include <vector>

#include "harness.h"
#include "other_op.h"

namespace torch_lms {
namespace {

TEST(ticks_grow_and_are_never_nothing) {
  const uint64_t first = OpClock::get().tick();
  CHECK(first != 0);
  CHECK(OpClock::get().tick() > first);
}

TEST(without_ops_nothing_has_been_running) {
  CHECK(!OpClock::get().running_since(OpClock::get().tick()));
  CHECK(!OpClock::get().running_since(UINT64_MAX));
}

TEST(an_op_that_began_before_a_tick_is_running_since_then) {
  OtherOp op;
  const uint64_t tick = OpClock::get().tick();
  CHECK(OpClock::get().running_since(tick));
  CHECK(OpClock::get().running_since(OpClock::get().tick()));
  op.end();
  CHECK(!OpClock::get().running_since(tick));
}

TEST(an_op_that_began_after_a_tick_is_not_running_since_then) {
  const uint64_t tick = OpClock::get().tick();
  OtherOp op;
  CHECK(!OpClock::get().running_since(tick));
  CHECK(OpClock::get().running_since(OpClock::get().tick()));
}

TEST(the_calling_threads_own_op_does_not_count) {
  OpClock::get().begin_op();
  const uint64_t tick = OpClock::get().tick();
  CHECK(!OpClock::get().running_since(tick));
  std::thread other([&] { CHECK(OpClock::get().running_since(tick)); });
  other.join();
  OpClock::get().end_op();
}

TEST(one_old_op_among_new_ones_counts) {
  OtherOp old;
  const uint64_t tick = OpClock::get().tick();
  OtherOp recent;
  CHECK(OpClock::get().running_since(tick));
  old.end();
  CHECK(!OpClock::get().running_since(tick));
}

TEST(a_thread_that_ended_in_its_op_is_forgotten) {
  std::thread([] { OpClock::get().begin_op(); }).join();
  CHECK(!OpClock::get().running_since(UINT64_MAX));
}

/// Note [Who may still use a storage]: as long as an op runs that did not find what has
/// been published, the publisher sees an op running, and does not free what it uses.
TEST(nothing_is_freed_under_an_op_that_could_not_know_of_it) {
  constexpr size_t kRounds = 20000;
  std::vector<std::atomic<bool>> published(kRounds);
  std::vector<std::atomic<bool>> freed(kRounds);
  std::atomic<size_t> round{0};
  std::thread ops([&] {
    for (size_t at = 0; at < kRounds; at = round.load()) {
      OpClock::get().begin_op();
      const bool found = published[at].load();
      for (int use = 0; use < 3 && !found; ++use) {
        CHECK(!freed[at].load());
      }
      OpClock::get().end_op();
    }
  });
  for (size_t i = 0; i < kRounds; ++i) {
    published[i].store(true);
    const uint64_t tick = OpClock::get().tick();
    while (OpClock::get().running_since(tick)) {
      std::this_thread::yield();
    }
    freed[i].store(true);
    round.store(i + 1);
  }
  ops.join();
}

TEST(threads_come_and_go_while_others_look) {
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([] {
      for (int i = 0; i < 50; ++i) {
        std::thread([] {
          OpClock::get().begin_op();
          OpClock::get().running_since(OpClock::get().tick());
          OpClock::get().end_op();
        }).join();
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  CHECK(!OpClock::get().running_since(UINT64_MAX));
}

TEST(a_child_that_is_forked_while_others_look_finds_the_lock_free) {
  std::atomic<bool> over{false};
  std::vector<std::thread> threads;
  for (int t = 0; t < 2; ++t) {
    threads.emplace_back([&] {
      while (!over) {
        OpClock::get().running_since(UINT64_MAX);
      }
    });
  }
  OpClock::this_thread();
  int passed = 0;
  for (int i = 0; i < 50 && passed == i; ++i) {
    passed += harness::passes_in_child([] {
      alarm(10);
      CHECK(!OpClock::get().running_since(UINT64_MAX));
    });
  }
  over = true;
  for (std::thread& thread : threads) {
    thread.join();
  }
  CHECK_EQ(passed, 50);
}

} // namespace
} // namespace torch_lms
