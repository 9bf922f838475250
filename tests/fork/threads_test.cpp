// Several threads at once; for the thread sanitizer above all.

#include <atomic>
#include <random>
#include <thread>
#include <vector>

#include "c10_harness.h"

#include "test_swap_device.h"

namespace {

constexpr size_t kBytes = size_t{64} << 10;
constexpr int kThreads = 4;

void in_threads(const std::function<void(unsigned)>& body) {
  std::vector<std::thread> threads;
  for (unsigned i = 0; i < kThreads; ++i) {
    threads.emplace_back(body, i);
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
}

TEST(threads_that_access_one_storage_find_the_same_bytes) {
  OpenEnvironment env;
  for (unsigned round = 0; round < 50; ++round) {
    const c10::Storage storage = make_storage(kBytes, round);
    env.pageout(storage);
    if (round % 3 == 1) {
      env.environment.wait_pageouts();
    }
    if (round % 3 == 2) {
      env.environment.wait_pageouts();
      env.environment.prefetch_all();
      env.prefetch(storage);
    }
    std::atomic<int> right{0};
    std::vector<void*> addresses(kThreads);
    in_threads([&](unsigned thread) {
      addresses[thread] = storage.data();
      right += holds(storage, round) ? 1 : 0;
    });
    CHECK_EQ(right.load(), kThreads);
    for (void* address : addresses) {
      CHECK(address == addresses[0]);
    }
  }
}

TEST(threads_page_storages_of_their_own_in_any_order) {
  OpenEnvironment env;
  env.environment.prefetch_all();
  std::atomic<int> wrong{0};
  in_threads([&](unsigned thread) {
    std::mt19937 random(thread);
    std::vector<std::pair<c10::Storage, unsigned>> storages;
    for (int step = 0; step < 400; ++step) {
      const unsigned seed = random();
      if (storages.size() < 4) {
        storages.emplace_back(make_storage(kBytes, seed), seed);
      }
      auto& entry = storages[random() % storages.size()];
      switch (random() % 6) {
        case 0:
        case 1:
          env.pageout(entry.first);
          break;
        case 2:
          env.prefetch(entry.first);
          break;
        case 3:
          wrong += holds(entry.first, entry.second) ? 0 : 1;
          break;
        case 4:
          std::swap(entry, storages.front());
          break;
        default:
          storages.erase(storages.begin());
      }
    }
    for (const auto& entry : storages) {
      wrong += holds(entry.first, entry.second) ? 0 : 1;
    }
  });
  CHECK_EQ(wrong.load(), 0);
}

TEST(waits_go_on_beside_accesses) {
  OpenEnvironment env;
  std::vector<c10::Storage> storages = env.paging_out(16, kBytes);
  std::atomic<int> wrong{0};
  std::thread waiter([&] {
    env.environment.wait_pageouts();
    env.environment.prefetch_init();
  });
  in_threads([&](unsigned thread) {
    for (unsigned i = thread; i < 16; i += 2) {
      wrong += holds(storages[i], i) ? 0 : 1;
    }
  });
  waiter.join();
  CHECK_EQ(wrong.load(), 0);
}

TEST(storages_die_on_other_threads_than_they_were_paged_out_on) {
  OpenEnvironment env;
  const size_t before = DeviceMemory::get().used();
  for (unsigned round = 0; round < 20; ++round) {
    std::vector<c10::Storage> storages = env.paging_out(kThreads, kBytes);
    in_threads([&](unsigned thread) { storages[thread] = c10::Storage(); });
  }
  env.environment.wait_pageouts();
  CHECK_EQ(DeviceMemory::get().used(), before);
  CHECK_EQ(TestSwapDevice::get().pool->stats().used_bytes, 0U);
}

} // namespace
