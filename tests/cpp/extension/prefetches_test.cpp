// What a plan has asked to come in begins in order, as soon as there is room for it.

#include <atomic>
#include <thread>

#include <extension/access/Prefetches.h>

#include "limited.h"

namespace torch_lms {
namespace {

bool is_coming(const at::Tensor& tensor) {
  return state(tensor) != "paged_out";
}

/// Automatic mode on the fake device, with tensors on the host; what is too large finds no piece.
struct Wanted : Limited {
  explicit Wanted(size_t limit_bytes)
      : Wanted(fake_device("the CPU's allocator has no pieces"), limit_bytes) {}
  Wanted(AsyncDevice& device, size_t limit_bytes) : Limited(limit_bytes), fake(device) {}
  ~Wanted() {
    fake.has_hole = nullptr;
  }

  at::Tensor ask(int64_t elements) {
    const at::Tensor tensor = tensor_of(elements, elements);
    REQUIRE(go_out(tensor));
    prefetches.add(tracked(tensor));
    return tensor;
  }
  void set_largest_piece(size_t nbytes) {
    fake.has_hole = [nbytes](size_t asked) { return asked <= nbytes; };
  }

  AsyncDevice& fake;
  Prefetches prefetches{lms().pager};
};

TEST(what_finds_no_piece_lets_others_pass_and_comes_later) {
  Wanted wanted(8 * kMiB);
  const at::Tensor large = wanted.ask(4 * kElements);
  const at::Tensor small = wanted.ask(kElements);
  const at::Tensor as_large = wanted.ask(4 * kElements);
  const at::Tensor smaller = wanted.ask(kElements / 2);
  wanted.set_largest_piece(kNbytes);
  wanted.prefetches.begin();
  CHECK(!is_coming(large) && !is_coming(as_large));
  CHECK(is_coming(small) && is_coming(smaller));
  CHECK(wanted.prefetches.any());
  wanted.set_largest_piece(4 * kNbytes);
  wanted.prefetches.begin();
  CHECK(is_coming(large) && is_coming(as_large));
  CHECK(!wanted.prefetches.any());
  CHECK(holds(large, 4 * kElements) && holds(small, kElements) && holds(smaller, kElements / 2));
}

TEST(where_memory_is_full_nothing_passes) {
  Wanted wanted(6 * kNbytes);
  const at::Tensor large = wanted.ask(4 * kElements);
  const at::Tensor small = wanted.ask(kElements);
  {
    const at::Tensor other = tensor_of(0, 3 * kElements);
    wanted.prefetches.begin();
    CHECK(!is_coming(large) && !is_coming(small)); // there would be room for the small one
    CHECK(!wanted.prefetches.end_cycle()); // it is not the plan's limit
  }
  wanted.prefetches.begin();
  CHECK(is_coming(large) && is_coming(small));
}

TEST(what_a_plan_has_no_room_for_waits_though_the_device_has) {
  Wanted wanted(6 * kNbytes);
  const at::Tensor first = wanted.ask(2 * kElements);
  const at::Tensor second = wanted.ask(2 * kElements);
  wanted.prefetches.set_limit(3 * kNbytes);
  wanted.prefetches.begin();
  CHECK(is_coming(first) && !is_coming(second));
  CHECK(wanted.prefetches.end_cycle());
  CHECK(!wanted.prefetches.end_cycle()); // nothing was asked for
  wanted.prefetches.set_limit(SIZE_MAX); // of no plan
  wanted.prefetches.begin();
  CHECK(is_coming(second) && !wanted.prefetches.any());
  CHECK(!wanted.prefetches.end_cycle());
}

TEST(those_that_pass_leave_room_for_what_finds_no_piece) {
  Wanted wanted(6 * kNbytes);
  const at::Tensor large = wanted.ask(4 * kElements);
  std::vector<at::Tensor> small;
  for (int i = 0; i < 4; ++i) {
    small.push_back(wanted.ask(kElements));
  }
  wanted.set_largest_piece(kNbytes);
  for (int i = 0; i < 3; ++i) {
    wanted.prefetches.begin();
  }
  CHECK(is_coming(small[0]) && is_coming(small[1]));
  CHECK(!is_coming(small[2]) && !is_coming(small[3]));
}

TEST(what_has_not_left_yet_comes_when_it_has) {
  Wanted wanted(8 * kMiB);
  const at::Tensor tensor = tensor_of(5, kElements);
  {
    const HeldCopies held;
    page_out({tensor});
    REQUIRE(state(tensor) != "paged_out" && state(tensor) != "resident");
    wanted.prefetches.add(tracked(tensor));
    wanted.prefetches.begin();
    CHECK(wanted.prefetches.any());
  }
  lms().manual.wait_pageouts();
  REQUIRE(state(tensor) == "paged_out");
  wanted.prefetches.begin();
  CHECK(is_coming(tensor) && !wanted.prefetches.any());
  CHECK(holds(tensor, 5));
}

TEST(what_has_come_in_or_gone_is_not_asked_for_any_more) {
  Wanted wanted(8 * kMiB);
  const at::Tensor used = wanted.ask(kElements);
  wanted.ask(kElements); // and it is gone
  CHECK(holds(used, kElements));
  const int64_t before = lms().pager.stats().prefetches.load();
  wanted.prefetches.begin();
  CHECK(!wanted.prefetches.any());
  CHECK_EQ(lms().pager.stats().prefetches.load(), before);
}

TEST(threads_that_ask_and_begin_at_once_lose_nothing) {
  Wanted wanted(8 * kMiB);
  std::vector<at::Tensor> tensors;
  for (int64_t i = 0; i < 12; ++i) {
    tensors.push_back(tensor_of(i, kElements / (1 + i % 3)));
  }
  std::atomic<uint32_t> holes{0};
  wanted.fake.has_hole = [&holes](size_t) { return holes.fetch_add(1) % 3 != 0; };
  std::vector<std::thread> threads;
  for (size_t thread = 0; thread < 3; ++thread) {
    threads.emplace_back([&, thread] {
      for (size_t round = 0; round < 60; ++round) {
        const at::Tensor& tensor = tensors[(5 * round + 4 * thread) % tensors.size()];
        page_out({tensor});
        wanted.prefetches.add(tracked(tensor));
        wanted.prefetches.begin();
        if (round % 20 == 19) {
          wanted.prefetches.clear();
        }
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  wanted.fake.has_hole = nullptr;
  lms().manual.wait_pageouts();
  for (int round = 0; round < 20 && wanted.prefetches.any(); ++round) {
    wanted.prefetches.begin();
  }
  CHECK(!wanted.prefetches.any());
  for (size_t i = 0; i < tensors.size(); ++i) {
    CHECK(holds(tensors[i], static_cast<int64_t>(i)));
  }
}

} // namespace
} // namespace torch_lms
