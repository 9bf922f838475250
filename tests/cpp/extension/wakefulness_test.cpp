// Automatic mode learns a program, sleeps while it fits, and is armed when it grows.

#include <atomic>
#include <chrono>
#include <thread>

#include "limited.h"

namespace torch_lms {
namespace {

bool falls_asleep(const at::Tensor& tensor) {
  for (int i = 0; i < 30000 && lms().policy.attention() != Attention::kAsleep; ++i) {
    tensor.eq(1);
  }
  return lms().policy.attention() == Attention::kAsleep;
}

TEST(a_program_that_fits_is_not_watched_until_it_grows) {
  const Limited limited(16 * kMiB);
  CHECK(lms().policy.attention() == Attention::kLearning);
  CHECK(lms().callbacks.observing());
  std::vector<at::Tensor> tensors;
  for (int i = 0; i < 4; ++i) {
    tensors.push_back(tensor_of(i, kElements));
  }
  REQUIRE(falls_asleep(tensor_of(0, 1024)));
  CHECK(!lms().callbacks.observing());

  while (lms().policy.attention() == Attention::kAsleep && tensors.size() < 100) {
    tensors.push_back(tensor_of(static_cast<int64_t>(tensors.size()), kElements));
  }
  CHECK(lms().policy.attention() == Attention::kArmed); // by the watermark
  CHECK(allocated() <= limited.limit_bytes);
  CHECK(lms().callbacks.observing());
  CHECK(lms().policy.wakefulness().wants_boundary());

  // Nothing goes out before the boundary: the thread may be inside of something that uses anything.
  {
    std::vector<at::Tensor> temporary;
    while (allocated() < limited.limit_bytes + 2 * kMiB) {
      temporary.push_back(tensor_of(1, kElements));
    }
    CHECK_EQ(pageouts(), 0);
    CHECK_EQ(lms().pager.paged_out_storages(), 0);
    CHECK(lms().pager.stats().limit_exceeded.load() > 0);
  }

  // From then on what has been used since goes out.
  lms().policy.wakefulness().note_boundary();
  CHECK(!lms().policy.wakefulness().wants_boundary());
  for (size_t i = 0; i < tensors.size(); ++i) {
    REQUIRE(holds(tensors[i], static_cast<int64_t>(i)));
  }
  for (int i = 0; i < 30; ++i) {
    tensors.push_back(tensor_of(static_cast<int64_t>(tensors.size()), kElements));
  }
  CHECK(pageouts() > 0);
  CHECK(allocated() <= limited.limit_bytes);
  for (size_t i = 0; i < tensors.size(); ++i) {
    REQUIRE(holds(tensors[i], static_cast<int64_t>(i)));
  }
  tensors.clear();
}

TEST(a_new_thread_wakes_it) {
  const Limited limited(16 * kMiB);
  REQUIRE(falls_asleep(tensor_of(0, 1024)));
  lms().policy.wakefulness().wake();
  CHECK(lms().policy.attention() == Attention::kArmed);
  CHECK(!lms().policy.wakefulness().wants_boundary());
  CHECK(lms().callbacks.observing());
}

TEST(a_mode_that_has_ended_stays_off) {
  const bool observing = lms().callbacks.observing();
  Wakefulness& wakefulness = lms().policy.wakefulness();
  std::atomic<bool> over{false};
  std::thread other([&] { // a cycle ends at each second call; what has learnt sleeps then
    for (bool backward = false; !over.load(); backward = !backward) {
      wakefulness.after_op(/*on_main_thread=*/true, /*of_program=*/true, backward);
      wakefulness.arm();
      std::this_thread::sleep_for(std::chrono::microseconds(20)); // the mutex is not fair
    }
  });
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(3);
  while (std::chrono::steady_clock::now() < end) {
    {
      const Limited limited(16 * kMiB);
      for (int i = 0; i < 50 && lms().policy.attention() != Attention::kAsleep; ++i) {
        std::this_thread::yield();
      }
    }
    CHECK(lms().policy.attention() == Attention::kOff);
    CHECK(!lms().pager.kept_copies().keeps());
    CHECK_EQ(lms().callbacks.observing(), observing);
  }
  over.store(true);
  other.join();
}

TEST(many_threads_cross_the_watermark_at_once) {
  for (int round = 0; round < 5; ++round) {
    const Limited limited(16 * kMiB);
    REQUIRE(falls_asleep(tensor_of(0, 1024)));
    std::vector<std::vector<at::Tensor>> own(4);
    in_threads(4, [&](int t) {
      for (int i = 0; i < 13; ++i) {
        own[static_cast<size_t>(t)].push_back(tensor_of(100 * t + i, kElements));
      }
    });
    CHECK(lms().policy.attention() == Attention::kArmed);
    lms().policy.wakefulness().note_boundary();
    for (int t = 0; t < 4; ++t) {
      for (int i = 0; i < 13; ++i) {
        CHECK(holds(own[static_cast<size_t>(t)][static_cast<size_t>(i)], 100 * t + i));
      }
    }
  }
}

TEST(the_limit_may_change_and_end_while_ops_run) {
  const Settled settled;
  std::atomic<bool> over{false};
  std::vector<std::thread> threads;
  for (int t = 0; t < 2; ++t) {
    threads.emplace_back([&, t] {
      std::vector<at::Tensor> own;
      while (own.size() < 8) {
        try {
          own.push_back(tensor_of(8 * t + static_cast<int64_t>(own.size()), kElements));
        } catch (const c10::OutOfMemoryError&) { // the other's may be unseen yet
        }
      }
      for (int i = 0; !over; ++i) {
        try {
          if (!holds(own[static_cast<size_t>(i % 8)], 8 * t + i % 8)) {
            CHECK(false);
            return;
          }
        } catch (const c10::OutOfMemoryError&) { // nothing more can go out for a moment
        }
      }
    });
  }
  for (int i = 0; i < 12; ++i) {
    lms().policy.enable(Program::get().device(), (3 + static_cast<size_t>(i) % 4) * kMiB, 4096);
    std::this_thread::sleep_for(std::chrono::milliseconds(15));
    if (i % 3 == 2) {
      lms().disable();
    }
  }
  over = true;
  for (std::thread& thread : threads) {
    thread.join();
  }
}

} // namespace
} // namespace torch_lms
