#include <entity/HostPool.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include <entity/Error.h>

#include "failing_new.h"
#include "fake_slab_source.h"
#include "harness.h"

namespace torch_lms {
namespace {

constexpr size_t kPage = 4096;
constexpr size_t kSlab = size_t{4} << 20;

HostPoolOptions limited(size_t limit_bytes) {
  HostPoolOptions options;
  options.limit_bytes = limit_bytes;
  return options;
}

// --- against a reference ------------------------------------------------------------

/// The same rules, the plain way: it keeps the used blocks alone, and finds the gaps
/// between them anew for each request.
class Reference {
 public:
  explicit Reference(const SourceRecord& record) : record_(record) {}

  /// The lowest of the smallest gaps that fit; null if none fits.
  char* expected_place(size_t nbytes) const {
    std::pair<size_t, char*> best{SIZE_MAX, nullptr};
    for (const auto& slab : record_.slabs) {
      char* at = slab.first;
      char* const end = slab.first + slab.second;
      for (auto block = used_.lower_bound(at); block != used_.end() && block->first < end;
           ++block) {
        consider(at, block->first, nbytes, best);
        at = block->first + block->second;
      }
      consider(at, end, nbytes, best);
    }
    return best.second;
  }

  /// Slabs of which no block is used.
  size_t free_slab_bytes() const {
    size_t nbytes = 0;
    for (const auto& slab : record_.slabs) {
      const auto block = used_.lower_bound(slab.first);
      const bool free = block == used_.end() || block->first >= slab.first + slab.second;
      nbytes += free ? slab.second : 0;
    }
    return nbytes;
  }

  void take(char* at, size_t nbytes) {
    const auto next = used_.lower_bound(at);
    CHECK(next == used_.end() || at + nbytes <= next->first);
    CHECK(next == used_.begin() || std::prev(next)->first + std::prev(next)->second <= at);
    used_.emplace(at, nbytes);
    used_bytes_ += nbytes;
  }

  char* free_any(std::mt19937& random) {
    const auto block = std::next(used_.begin(), static_cast<long>(random() % used_.size()));
    char* at = block->first;
    used_bytes_ -= block->second;
    used_.erase(block);
    return at;
  }

  size_t used_bytes() const {
    return used_bytes_;
  }
  size_t count() const {
    return used_.size();
  }

 private:
  static void consider(char* from, char* to, size_t nbytes, std::pair<size_t, char*>& best) {
    const size_t gap = static_cast<size_t>(to - from);
    if (gap >= nbytes) {
      best = std::min(best, {gap, from});
    }
  }

  const SourceRecord& record_;
  std::map<char*, size_t> used_;
  size_t used_bytes_ = 0;
};

size_t random_size(std::mt19937& random) {
  const size_t pages = random() % 8 == 0 ? 1 + random() % 1500 : 1 + random() % 60;
  return pages * kPage;
}

/// One request on both sides.
void allocate_on_both(
    HostPool& pool,
    Reference& reference,
    const SourceRecord& record,
    size_t nbytes) {
  char* const expected = reference.expected_place(nbytes);
  const size_t acquired = record.acquired;
  const size_t immovable = record.outstanding_bytes - reference.free_slab_bytes();
  const size_t limit = pool.stats().limit_bytes;
  try {
    char* found = static_cast<char*>(pool.allocate(nbytes));
    if (expected != nullptr) {
      CHECK_EQ(static_cast<void*>(found), static_cast<void*>(expected));
      CHECK_EQ(record.acquired, acquired);
    } else {
      CHECK_EQ(record.acquired, acquired + 1);
    }
    reference.take(found, nbytes);
  } catch (const HostPoolFull&) {
    CHECK(expected == nullptr);
    CHECK(immovable + nbytes > limit); // there was no way to make room
  }
}

void compare(const HostPool& pool, const Reference& reference, const SourceRecord& record) {
  const HostPoolStats stats = pool.stats();
  CHECK_EQ(stats.used_bytes, reference.used_bytes());
  CHECK_EQ(stats.slab_bytes, record.outstanding_bytes);
  CHECK_EQ(stats.slabs, record.slabs.size());
}

void run_against_reference(unsigned seed, size_t limit_bytes) {
  std::mt19937 random(seed);
  SourceRecord record;
  HostPool pool(std::make_unique<FakeSlabSource>(record, kSlab), limited(limit_bytes));
  Reference reference(record);
  for (int step = 0; step < 2500; ++step) {
    const unsigned dice = random() % 100;
    const bool shrinking = step / 500 % 2 == 1;
    if (dice < (shrinking ? 35U : 60U) || reference.count() == 0) {
      allocate_on_both(pool, reference, record, random_size(random));
    } else if (dice < 98) {
      pool.free(reference.free_any(random));
    } else {
      const size_t rest = record.outstanding_bytes - reference.free_slab_bytes();
      pool.trim();
      CHECK_EQ(record.outstanding_bytes, rest);
    }
    compare(pool, reference, record);
  }
  CHECK(record.peak_bytes <= limit_bytes);
  while (reference.count() != 0) {
    pool.free(reference.free_any(random));
  }
  pool.trim();
  CHECK_EQ(record.outstanding_bytes, 0);
}

TEST(random_blocks_are_where_the_reference_has_them) {
  for (unsigned seed = 0; seed < 6; ++seed) {
    run_against_reference(seed, SIZE_MAX);
  }
}

TEST(random_blocks_at_a_limit_are_where_the_reference_has_them) {
  for (unsigned seed = 0; seed < 6; ++seed) {
    run_against_reference(seed, 3 * kSlab + seed * 5 * kPage);
  }
}

// --- without memory for the pool's own books ------------------------------------------

/// Returns whether an allocation failed. Blocks that were had keep their bytes.
bool run_with_failure(long nth) {
  std::mt19937 random(7);
  SourceRecord record;
  HostPool pool(std::make_unique<FakeSlabSource>(record, kSlab), limited(3 * kSlab));
  std::vector<std::pair<char*, size_t>> blocks;
  blocks.reserve(200);
  bool failed = false;
  {
    const FailingNew failing(nth);
    for (int step = 0; step < 120; ++step) {
      if (random() % 5 < 3 || blocks.empty()) {
        const size_t nbytes = random_size(random);
        try {
          char* at = static_cast<char*>(pool.allocate(nbytes));
          at[0] = at[nbytes - 1] = static_cast<char>(step);
          blocks.emplace_back(at, nbytes);
        } catch (const std::bad_alloc&) {
        } catch (const HostPoolFull&) {
        }
      } else {
        std::swap(blocks[random() % blocks.size()], blocks.back());
        pool.free(blocks.back().first);
        blocks.pop_back();
      }
    }
    failed = failing.failed();
  }
  for (const auto& block : blocks) {
    CHECK_EQ(block.first[0], block.first[block.second - 1]);
    pool.free(block.first);
  }
  CHECK_EQ(pool.stats().used_bytes, 0);
  CHECK_EQ(pool.stats().slab_bytes, record.outstanding_bytes);
  pool.free(pool.allocate(3 * kSlab)); // nothing is lost: all of it can be had in one
  pool.trim();
  CHECK_EQ(record.outstanding_bytes, 0);
  return failed;
}

TEST(no_block_is_lost_when_any_one_allocation_fails) {
  long nth = 0;
  while (run_with_failure(nth)) {
    ++nth;
  }
  CHECK(nth > 100);
}

// --- threads --------------------------------------------------------------------------

/// A block filled with its owner's mark.
struct Filled {
  uint64_t* data;
  size_t count;
  uint64_t mark;
};

bool intact(const Filled& block) {
  return std::all_of(
      block.data, block.data + block.count, [&](uint64_t word) { return word == block.mark; });
}

void churn(HostPool& pool, unsigned seed, int steps) {
  std::mt19937 random(seed);
  std::vector<Filled> blocks;
  for (int step = 0; step < steps; ++step) {
    if (random() % 2 == 0 || blocks.empty()) {
      const size_t nbytes = (1 + random() % 40) * kPage;
      try {
        auto* data = static_cast<uint64_t*>(pool.allocate(nbytes));
        const Filled block{data, nbytes / sizeof(uint64_t), seed * 1000003ULL + random()};
        std::fill_n(block.data, block.count, block.mark);
        blocks.push_back(block);
      } catch (const HostPoolFull&) {
      }
    } else {
      std::swap(blocks[random() % blocks.size()], blocks.back());
      CHECK(intact(blocks.back()));
      pool.free(blocks.back().data);
      blocks.pop_back();
    }
    if (random() % 64 == 0) {
      pool.trim();
    }
  }
  for (const Filled& block : blocks) {
    CHECK(intact(block));
    pool.free(block.data);
  }
}

void churn_in_threads(HostPool& pool) {
  std::vector<std::thread> threads;
  for (unsigned seed = 1; seed <= 4; ++seed) {
    threads.emplace_back([&pool, seed] { churn(pool, seed, 3000); });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
}

TEST(threads_keep_their_blocks_apart_and_the_limit) {
  SourceRecord record;
  constexpr size_t kLimit = 2 * kSlab + 3 * kPage;
  HostPool pool(std::make_unique<FakeSlabSource>(record, kSlab / 2), limited(kLimit));
  churn_in_threads(pool);
  CHECK(record.peak_bytes <= kLimit);
  CHECK_EQ(pool.stats().used_bytes, 0);
  pool.trim();
  CHECK_EQ(record.outstanding_bytes, 0);
}

TEST(the_limit_may_change_while_threads_allocate) {
  HostPool pool(std::make_unique<AnonymousSlabSource>(kSlab / 4), limited(kSlab));
  std::atomic<bool> stop{false};
  std::thread changer([&] {
    for (size_t i = 0; !stop; ++i) {
      pool.set_limit((1 + i % 8) * kSlab / 4);
    }
  });
  churn_in_threads(pool);
  stop = true;
  changer.join();
  pool.trim();
  CHECK_EQ(pool.stats().slab_bytes, 0);
}

} // namespace
} // namespace torch_lms
