// What a plan has asked to come in begins in order, as soon as there is room for it.

#include <atomic>
#include <thread>

#include <extension/access/Prefetches.h>

#include "limited.h"

namespace torch_lms {
namespace {

EntityPtr entity_of(const at::Tensor& tensor) {
  return lms().pager.find(tensor);
}

bool is_coming(const at::Tensor& tensor) {
  return state(tensor) != "paged_out";
}

/// Automatic mode on the fake device, with tensors on the host; what is too large finds no piece.
struct Asked : Limited {
  explicit Asked(size_t limit_bytes) : Limited(limit_bytes) {}
  ~Asked() {
    Program::get().async->has_hole = nullptr;
  }

  at::Tensor ask(int64_t elements) {
    const at::Tensor tensor = tensor_of(elements, elements);
    REQUIRE(go_out(tensor));
    prefetches.add(entity_of(tensor));
    return tensor;
  }
  void set_largest_piece(size_t nbytes) {
    Program::get().async->has_hole = [nbytes](size_t asked) { return asked <= nbytes; };
  }

  Prefetches prefetches{lms().pager};
};

bool has_fake() {
  Program::get();
  return Program::get().async != nullptr;
}

TEST(what_finds_no_piece_lets_others_pass_and_comes_later) {
  if (!has_fake()) {
    SKIP("the CPU's allocator has no pieces");
  }
  Asked asked(8 * kMiB);
  const at::Tensor large = asked.ask(4 * kElements);
  const at::Tensor small = asked.ask(kElements);
  const at::Tensor as_large = asked.ask(4 * kElements);
  const at::Tensor smaller = asked.ask(kElements / 2);
  asked.set_largest_piece(kNbytes);
  asked.prefetches.begin();
  CHECK(!is_coming(large) && !is_coming(as_large));
  CHECK(is_coming(small) && is_coming(smaller));
  CHECK(asked.prefetches.any());
  asked.set_largest_piece(4 * kNbytes);
  asked.prefetches.begin();
  CHECK(is_coming(large) && is_coming(as_large));
  CHECK(!asked.prefetches.any());
  CHECK(holds(large, 4 * kElements) && holds(small, kElements) && holds(smaller, kElements / 2));
}

TEST(where_memory_is_full_nothing_passes) {
  if (!has_fake()) {
    SKIP("the CPU's allocator has no pieces");
  }
  Asked asked(6 * kNbytes);
  const at::Tensor large = asked.ask(4 * kElements);
  const at::Tensor small = asked.ask(kElements);
  {
    const at::Tensor other = tensor_of(0, 3 * kElements);
    asked.prefetches.begin();
    CHECK(!is_coming(large) && !is_coming(small)); // there would be room for the small one
  }
  asked.prefetches.begin();
  CHECK(is_coming(large) && is_coming(small));
}

TEST(those_that_pass_leave_room_for_what_finds_no_piece) {
  if (!has_fake()) {
    SKIP("the CPU's allocator has no pieces");
  }
  Asked asked(6 * kNbytes);
  const at::Tensor large = asked.ask(4 * kElements);
  std::vector<at::Tensor> small;
  for (int i = 0; i < 4; ++i) {
    small.push_back(asked.ask(kElements));
  }
  asked.set_largest_piece(kNbytes);
  for (int i = 0; i < 3; ++i) {
    asked.prefetches.begin();
  }
  CHECK(is_coming(small[0]) && is_coming(small[1]));
  CHECK(!is_coming(small[2]) && !is_coming(small[3]));
}

TEST(what_has_not_left_yet_comes_when_it_has) {
  if (!has_fake()) {
    SKIP("the CPU copies while the program waits");
  }
  Asked asked(8 * kMiB);
  const at::Tensor tensor = tensor_of(5, kElements);
  {
    const HeldCopies held;
    page_out({tensor});
    REQUIRE(state(tensor) != "paged_out" && state(tensor) != "resident");
    asked.prefetches.add(entity_of(tensor));
    asked.prefetches.begin();
    CHECK(asked.prefetches.any());
  }
  lms().manual.wait_pageouts();
  REQUIRE(state(tensor) == "paged_out");
  asked.prefetches.begin();
  CHECK(is_coming(tensor) && !asked.prefetches.any());
  CHECK(holds(tensor, 5));
}

TEST(what_has_come_in_or_gone_is_not_asked_for_any_more) {
  if (!has_fake()) {
    SKIP("the CPU's allocator has no pieces");
  }
  Asked asked(8 * kMiB);
  const at::Tensor used = asked.ask(kElements);
  asked.ask(kElements); // and it is gone
  CHECK(holds(used, kElements));
  const int64_t before = lms().pager.stats().prefetches.load();
  asked.prefetches.begin();
  CHECK(!asked.prefetches.any());
  CHECK_EQ(lms().pager.stats().prefetches.load(), before);
}

TEST(threads_that_ask_and_begin_at_once_lose_nothing) {
  if (!has_fake()) {
    SKIP("the CPU's allocator has no pieces");
  }
  Asked asked(8 * kMiB);
  std::vector<at::Tensor> tensors;
  for (int64_t i = 0; i < 12; ++i) {
    tensors.push_back(tensor_of(i, kElements / (1 + i % 3)));
  }
  std::atomic<uint32_t> holes{0};
  Program::get().async->has_hole = [&holes](size_t) { return holes.fetch_add(1) % 3 != 0; };
  std::vector<std::thread> threads;
  for (size_t thread = 0; thread < 3; ++thread) {
    threads.emplace_back([&, thread] {
      for (size_t round = 0; round < 60; ++round) {
        const at::Tensor& tensor = tensors[(5 * round + 4 * thread) % tensors.size()];
        page_out({tensor});
        asked.prefetches.add(entity_of(tensor));
        asked.prefetches.begin();
        if (round % 20 == 19) {
          asked.prefetches.clear();
        }
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  Program::get().async->has_hole = nullptr;
  lms().manual.wait_pageouts();
  for (int round = 0; round < 20 && asked.prefetches.any(); ++round) {
    asked.prefetches.begin();
  }
  CHECK(!asked.prefetches.any());
  for (size_t i = 0; i < tensors.size(); ++i) {
    CHECK(holds(tensors[i], static_cast<int64_t>(i)));
  }
}

} // namespace
} // namespace torch_lms
