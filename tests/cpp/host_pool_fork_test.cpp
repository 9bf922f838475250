#include <entity/HostPool.h>

#include <pthread.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include <entity/Error.h>

#include "baton.h"
#include "harness.h"
#include "temporary_directory.h"

namespace torch_lms {
namespace {

constexpr size_t kPage = 4096;
constexpr size_t kMiB = size_t{1} << 20;
constexpr size_t kSlab = 2 * kMiB;

HostPool* watched = nullptr;

/// A pool on spill files that hears of every fork, as the extension's do.
class WatchedPool {
 public:
  WatchedPool() : pool(std::make_unique<FileSlabSource>(directory_.path(), kSlab), {}) {
    static const int registered = pthread_atfork(
        [] { return watched == nullptr ? void() : watched->prepare_fork(); },
        [] { return watched == nullptr ? void() : watched->after_fork_in_parent(); },
        [] { return watched == nullptr ? void() : watched->reclone_after_fork(); });
    CHECK_EQ(registered, 0);
    watched = &pool;
  }
  ~WatchedPool() {
    watched = nullptr;
  }
  WatchedPool(const WatchedPool&) = delete;
  WatchedPool& operator=(const WatchedPool&) = delete;

 private:
  TemporaryDirectory directory_;

 public:
  HostPool pool;
};

struct Block {
  char* data;
  size_t nbytes;
};

Block take(HostPool& pool, size_t nbytes, char value) {
  const Block block{static_cast<char*>(pool.allocate(nbytes)), nbytes};
  std::memset(block.data, value, nbytes);
  return block;
}

bool filled(const Block& block, char value) {
  return std::all_of(
      block.data, block.data + block.nbytes, [value](char byte) { return byte == value; });
}

TEST(a_child_has_the_bytes_of_the_moment_of_the_fork) {
  WatchedPool watched_pool;
  const Block block = take(watched_pool.pool, 24 * kMiB, 'p');
  Baton wrote;
  const pid_t child = harness::start_child([&] {
    wrote.await();
    CHECK(filled(block, 'p'));
    std::memset(block.data, 'c', block.nbytes);
    CHECK(filled(block, 'c'));
  });
  std::memset(block.data, 'q', block.nbytes); // at once: the child has its copy by now
  wrote.pass();
  CHECK(harness::child_passed(child));
  CHECK(filled(block, 'q'));
}

TEST(the_pool_works_on_both_sides_of_a_fork) {
  WatchedPool watched_pool;
  HostPool& pool = watched_pool.pool;
  const Block block = take(pool, kMiB, 'p');
  CHECK(harness::passes_in_child([&] {
    pool.free(block.data);
    CHECK_EQ(pool.stats().used_bytes, 0);
    const Block large = take(pool, 3 * kSlab, 'c');
    CHECK(filled(large, 'c'));
    pool.trim();
    CHECK_EQ(pool.stats().slabs, 1);
    CHECK(harness::passes_in_child([&] { CHECK(filled(large, 'c')); }));
  }));
  CHECK_EQ(pool.stats().used_bytes, kMiB);
  CHECK(filled(block, 'p'));
  pool.free(block.data);
  pool.trim();
  CHECK_EQ(pool.stats().slab_bytes, 0);
}

TEST(a_pool_without_files_forks_too) {
  HostPool pool(std::make_unique<AnonymousSlabSource>(kSlab), {});
  const Block block = take(pool, kMiB, 'p');
  pool.after_fork_in_parent(); // it was not prepared: no effect
  pool.prepare_fork();
  pool.after_fork_in_parent();
  pool.prepare_fork();
  CHECK(harness::passes_in_child([&] {
    pool.reclone_after_fork();
    CHECK(filled(block, 'p'));
    take(pool, kMiB, 'c');
  }));
  pool.after_fork_in_parent();
  pool.free(block.data);
}

TEST(a_child_that_dies_while_copying_does_not_hold_the_parent_up) {
  HostPool pool(std::make_unique<AnonymousSlabSource>(kSlab), {});
  TemporaryDirectory directory;
  HostPool files(std::make_unique<FileSlabSource>(directory.path(), kSlab), {});
  files.allocate(kMiB);
  files.prepare_fork();
  const pid_t child = harness::start_child([] { _exit(3); });
  files.after_fork_in_parent();
  CHECK(!harness::child_passed(child));
  files.allocate(kMiB);
}

/// Until told to stop: blocks come and go, their bytes with them.
void churn(HostPool& pool, unsigned seed, const std::atomic<bool>& stop) {
  std::mt19937 random(seed);
  std::vector<Block> blocks;
  while (!stop) {
    if (blocks.size() < 20 && random() % 2 == 0) {
      blocks.push_back(take(pool, (1 + random() % 60) * kPage, static_cast<char>(seed)));
    } else if (!blocks.empty()) {
      std::swap(blocks[random() % blocks.size()], blocks.back());
      CHECK(filled(blocks.back(), static_cast<char>(seed)));
      pool.free(blocks.back().data);
      blocks.pop_back();
    }
    if (random() % 16 == 0) {
      pool.trim();
    }
  }
  for (const Block& block : blocks) {
    pool.free(block.data);
  }
}

TEST(forks_while_other_threads_allocate_and_free) {
  WatchedPool watched_pool;
  HostPool& pool = watched_pool.pool;
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  for (unsigned seed = 1; seed <= 3; ++seed) {
    threads.emplace_back([&, seed] { churn(pool, seed, stop); });
  }
  for (int round = 0; round < 8; ++round) {
    const Block block = take(pool, kMiB, 'p');
    const pid_t child = harness::start_child([&] {
      CHECK(filled(block, 'p'));
      const Block mine = take(pool, kMiB, 'c');
      CHECK(filled(mine, 'c') && filled(block, 'p'));
      pool.free(mine.data);
    });
    std::memset(block.data, 'q', block.nbytes);
    pool.free(block.data); // for the other threads
    CHECK(harness::child_passed(child));
  }
  stop = true;
  for (std::thread& thread : threads) {
    thread.join();
  }
  pool.trim();
  CHECK_EQ(pool.stats().slab_bytes, 0);
}

} // namespace
} // namespace torch_lms
