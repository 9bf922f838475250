// Children forked while storages move.

#include <atomic>
#include <chrono>
#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "c10_harness.h"

#include <c10/core/impl/ForkGate.h>

#include "test_swap_device.h"

namespace {

using torch_lms::EntityState;

constexpr size_t kBytes = size_t{64} << 10;

/// Opens a gate from another thread, a moment later.
class OpenLater {
 public:
  explicit OpenLater(Gate& gate)
      : thread_([&gate] {
          std::this_thread::sleep_for(std::chrono::milliseconds(30));
          gate.open();
        }) {}
  ~OpenLater() {
    thread_.join();
  }

 private:
  std::thread thread_;
};

/// Of storages whose seeds are their places.
void check_bytes(const std::vector<c10::Storage>& storages) {
  for (unsigned i = 0; i < storages.size(); ++i) {
    CHECK(holds(storages[i], i));
  }
}

TEST(a_child_reads_and_writes_what_is_out) {
  OpenEnvironment env;
  const c10::Storage storage = make_storage(kBytes, 7);
  env.pageout_and_wait(storage);
  CHECK(harness::passes_in_child([&] {
    CHECK(env.state(storage) == EntityState::kPagedOut);
    CHECK(holds(storage, 7));
    CHECK(env.state(storage) == EntityState::kResident);
    static_cast<unsigned char*>(storage.data())[0] = 99;
    CHECK_EQ(env.environment.stats().paged_out_storages, 0);
  }));
  CHECK(env.state(storage) == EntityState::kPagedOut);
  CHECK(holds(storage, 7));
}

TEST(a_child_forked_in_the_middle_of_a_pageout_has_its_bytes) {
  OpenEnvironment env;
  env.backend.out.shut();
  const std::vector<c10::Storage> storages = env.paging_out(2, kBytes);
  env.backend.out.await_arrivals(1);
  const OpenLater later(env.backend.out);
  CHECK(harness::passes_in_child([&] { check_bytes(storages); }));
  env.environment.wait_pageouts();
  check_bytes(storages);
}

TEST(a_child_forked_in_the_middle_of_a_prefetch_has_its_bytes) {
  OpenEnvironment env;
  const std::vector<c10::Storage> storages = env.paging_out(2, kBytes);
  env.environment.wait_pageouts();
  env.environment.prefetch_all();
  env.backend.in.shut();
  env.prefetch(storages[0]);
  env.prefetch(storages[1]);
  env.backend.in.await_arrivals(1);
  const OpenLater later(env.backend.in);
  CHECK(harness::passes_in_child([&] { check_bytes(storages); }));
  env.environment.wait_pending_pageins();
  check_bytes(storages);
}

TEST(in_a_child_what_needs_a_worker_says_so) {
  OpenEnvironment env;
  const c10::Storage storage = make_storage(kBytes, 3);
  env.pageout_and_wait(storage);
  using Step = std::function<void(c10::impl::SwapEnvironment&)>;
  c10::StorageImpl& impl = *storage.unsafeGetStorageImpl();
  const std::vector<Step> steps = {
      [](auto& swap) { swap.open(0); },
      [](auto& swap) { swap.close(); },
      [](auto& swap) { swap.set_host_limit(0); },
      [](auto& swap) { swap.prefetch_init(); },
      [](auto& swap) { swap.prefetch_all(); },
      [](auto& swap) { swap.wait_pageouts(); },
      [](auto& swap) { swap.wait_pending_pageouts(); },
      [](auto& swap) { swap.wait_pending_pageins(); },
      [&impl](auto& swap) { swap.pageout(impl); },
      [&impl](auto& swap) { swap.prefetch(impl); },
  };
  CHECK(harness::passes_in_child([&] {
    for (const Step& step : steps) {
      CHECK_THROWS(step(env.environment), torch_lms::Error, "'spawn'");
    }
    env.environment.pagein_all();
    CHECK(env.state(storage) == EntityState::kResident);
    CHECK(holds(storage, 3));
  }));
  env.environment.wait_pageouts(); // the parent goes on
  CHECK(holds(storage, 3));
}

TEST(a_child_of_a_process_that_does_not_page_now_can_page) {
  std::vector<c10::Storage> storages;
  {
    OpenEnvironment env;
    storages.push_back(make_storage(kBytes, 5));
    env.pageout_and_wait(storages[0]);
  }
  CHECK(harness::passes_in_child([&] {
    OpenEnvironment env;
    env.pageout_and_wait(storages[0]);
    CHECK(env.state(storages[0]) == EntityState::kPagedOut);
    env.environment.prefetch_all();
    env.prefetch(storages[0]);
    env.environment.wait_pending_pageins();
    CHECK(holds(storages[0], 5));
  }));
}

TEST(a_child_of_a_child_has_its_bytes_too) {
  OpenEnvironment env;
  const c10::Storage storage = make_storage(kBytes, 4);
  env.pageout_and_wait(storage);
  CHECK(harness::passes_in_child([&] {
    CHECK(harness::passes_in_child([&] { CHECK(holds(storage, 4)); }));
    CHECK(holds(storage, 4));
  }));
}

TEST(a_child_can_drop_what_was_moving) {
  OpenEnvironment env;
  std::vector<c10::Storage> storages = env.paging_out(4, kBytes);
  env.environment.wait_pageouts();
  env.prefetch(storages[0]); // it waits: nobody has called `prefetch_all`
  CHECK(harness::passes_in_child([&] { storages.clear(); }));
  CHECK(holds(storages[0], 0));
}

TEST(forks_beside_threads_that_page) {
  OpenEnvironment env;
  env.environment.prefetch_all();
  constexpr unsigned kThreads = 3;
  std::vector<c10::Storage> storages;
  for (unsigned i = 0; i < 2 * kThreads; ++i) {
    storages.push_back(make_storage(kBytes, i));
  }
  std::atomic<bool> stop{false};
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (unsigned thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([&, thread] {
      for (unsigned step = 0; !stop.load(); ++step) {
        const unsigned i = 2 * thread + step % 2;
        env.pageout(storages[i]);
        if (step % 3 == 0) {
          env.environment.wait_pending_pageouts();
          env.prefetch(storages[i]);
        }
        wrong += holds(storages[i], i) ? 0 : 1;
      }
    });
  }
  for (int fork = 0; fork < 30; ++fork) {
    CHECK(harness::passes_in_child([&] { check_bytes(storages); }));
  }
  stop = true;
  for (std::thread& thread : threads) {
    thread.join();
  }
  CHECK_EQ(wrong.load(), 0);
}

TEST(a_fork_waits_for_who_closes_the_environment) {
  const c10::Storage storage = make_storage(kBytes, 6);
  for (int round = 0; round < 20; ++round) {
    OpenEnvironment env;
    env.pageout(storage);
    std::atomic<bool> forked{false};
    std::thread closes([&] {
      env.environment.close();
      while (!forked.load()) { // a child would miss who joins a thread that has ended
        std::this_thread::yield();
      }
    });
    CHECK(harness::passes_in_child([&] { CHECK(holds(storage, 6)); }));
    forked = true;
    closes.join();
  }
}

TEST(a_child_can_page_though_threads_of_its_parent_were_about_to_wake_up) {
#ifdef __SANITIZE_THREAD__
  SKIP("a child of many threads starts none under ThreadSanitizer");
#endif
#ifdef __SANITIZE_ADDRESS__
  SKIP(
      "AddressSanitizer's allocator of GCC 12 is not safe at a fork: the threads use it meanwhile");
#endif
  constexpr int kThreads = 64; // some have not woken up when it forks
  const c10::Storage storage = make_storage(kBytes, 5);
  for (int round = 0; round < 60; ++round) {
    OpenEnvironment env;
    env.pageout_and_wait(storage);
    env.environment.prefetch_all();
    env.backend.in.shut();
    env.prefetch(storage);
    env.backend.in.await_arrivals(1);
    std::atomic<int> begun{0};
    std::vector<std::thread> threads;
    for (int i = 0; i < kThreads; ++i) {
      threads.emplace_back([&] {
        ++begun;
        env.environment.wait_pending_pageins();
      });
    }
    while (begun.load() != kThreads) {
      std::this_thread::yield();
    }
    const OpenLater later(env.backend.in);
    env.environment.close();
    CHECK(harness::passes_in_child([&] {
      for (int step = 0; step < 2; ++step) {
        OpenEnvironment again;
        again.pageout_and_wait(storage);
        again.environment.prefetch_all();
        again.prefetch(storage);
        again.environment.wait_pending_pageins();
        CHECK(holds(storage, 5));
      }
    }));
    for (std::thread& thread : threads) {
      thread.join();
    }
  }
}

TEST(a_thread_that_forks_while_it_pages_does_not_wait_for_itself) {
  const c10::impl::ForkGate::Passage passage;
  const c10::impl::ForkGate::Passage within;
  CHECK(harness::passes_in_child([] { const c10::impl::ForkGate::Passage another; }));
}

} // namespace
