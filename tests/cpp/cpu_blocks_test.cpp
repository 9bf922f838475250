#include <extension/memory/CpuBlocks.h>

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <functional>
#include <list>
#include <new>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "failing_new.h"
#include "harness.h"

namespace torch_lms {
namespace {

constexpr size_t kPage = 4096;

bool mapped(void* page) {
  unsigned char resident = 0;
  return mincore(page, kPage, &resident) == 0 || errno != ENOMEM;
}

TEST(blocks_are_page_aligned_and_writable_to_the_end) {
  CpuBlocks blocks;
  for (size_t nbytes : {size_t{1}, kPage - 1, kPage, kPage + 1, 100 * kPage + 7}) {
    char* data = static_cast<char*>(blocks.allocate(nbytes));
    CHECK_EQ(reinterpret_cast<uintptr_t>(data) % kPage, 0);
    data[0] = data[nbytes - 1] = 1;
    blocks.free(data, nbytes);
  }
}

TEST(zero_bytes_are_a_block_too) {
  CpuBlocks blocks;
  void* data = blocks.allocate(0);
  CHECK(data != nullptr);
  blocks.free(data, 0);
  CHECK_EQ(blocks.cached_bytes(), kPage);
}

TEST(freeing_null_is_nothing) {
  CpuBlocks blocks;
  blocks.free(nullptr, kPage);
  CHECK_EQ(blocks.cached_bytes(), 0);
}

TEST(a_freed_block_serves_the_same_size_only) {
  CpuBlocks blocks;
  void* data = blocks.allocate(3 * kPage);
  blocks.free(data, 3 * kPage);
  CHECK_EQ(blocks.cached_bytes(), 3 * kPage);
  void* larger = blocks.allocate(4 * kPage);
  void* smaller = blocks.allocate(2 * kPage);
  CHECK(larger != data && smaller != data);
  CHECK_EQ(blocks.allocate(3 * kPage - 5), data); // in pages
  CHECK_EQ(blocks.cached_bytes(), 0);
  blocks.free(data, 3 * kPage - 5);
  blocks.free(larger, 4 * kPage);
  blocks.free(smaller, 2 * kPage);
}

TEST(memory_goes_back_to_the_system_at_once) {
  CpuBlocks blocks(0);
  void* data = blocks.allocate(kPage);
  CHECK(mapped(data));
  blocks.free(data, kPage);
  CHECK(!mapped(data));
}

TEST(the_cache_keeps_what_was_freed_last) {
  CpuBlocks blocks(4 * kPage);
  std::vector<void*> data;
  for (int i = 0; i < 3; ++i) {
    data.push_back(blocks.allocate(2 * kPage));
  }
  for (void* block : data) {
    blocks.free(block, 2 * kPage);
  }
  CHECK(!mapped(data[0]));
  CHECK_EQ(blocks.cached_bytes(), 4 * kPage);
  CHECK_EQ(blocks.allocate(2 * kPage), data[2]);
  CHECK_EQ(blocks.allocate(2 * kPage), data[1]);
  blocks.free(data[1], 2 * kPage);
  blocks.free(data[2], 2 * kPage);
}

TEST(a_block_larger_than_the_cache_leaves_it_alone) {
  CpuBlocks blocks(4 * kPage);
  void* small = blocks.allocate(kPage);
  void* large = blocks.allocate(5 * kPage);
  blocks.free(small, kPage);
  blocks.free(large, 5 * kPage);
  CHECK(!mapped(large));
  CHECK_EQ(blocks.cached_bytes(), kPage);
}

TEST(the_cache_can_be_dropped) {
  CpuBlocks blocks;
  void* data = blocks.allocate(kPage);
  blocks.free(data, kPage);
  blocks.drop_cache();
  CHECK(!mapped(data));
  CHECK_EQ(blocks.cached_bytes(), 0);
  blocks.drop_cache();
}

TEST(the_destructor_drops_the_cache) {
  void* data = nullptr;
  {
    CpuBlocks blocks;
    data = blocks.allocate(kPage);
    blocks.free(data, kPage);
    CHECK(mapped(data));
  }
  CHECK(!mapped(data));
}

TEST(sizes_beyond_all_memory_are_bad_alloc) {
  CpuBlocks blocks;
  for (size_t nbytes : {SIZE_MAX, SIZE_MAX - 1, SIZE_MAX - kPage, SIZE_MAX / 2, size_t{1} << 62}) {
    CHECK_THROWS(blocks.allocate(nbytes), std::bad_alloc, "");
  }
}

TEST(without_memory_for_its_books_the_cache_lets_go) {
  for (long nth = 0; nth < 2; ++nth) {
    CpuBlocks blocks(2 * kPage);
    void* data = blocks.allocate(kPage);
    void* other = blocks.allocate(kPage);
    void* third = blocks.allocate(2 * kPage);
    {
      const FailingNew failing(nth);
      blocks.free(data, kPage);
      CHECK(failing.failed());
    }
    CHECK(!mapped(data));
    CHECK_EQ(blocks.cached_bytes(), 0);
    blocks.free(other, kPage);
    CHECK_EQ(blocks.cached_bytes(), kPage);
    blocks.free(third, 2 * kPage); // in place of the other: nothing is left of the first
    CHECK_EQ(blocks.cached_bytes(), 2 * kPage);
    CHECK(!mapped(other) && mapped(third));
  }
}

// --- against a reference --------------------------------------------------------------

/// The cache's rules, the plain way: a list by age.
class Reference {
 public:
  explicit Reference(size_t max_bytes) : max_bytes_(max_bytes) {}

  /// The block that is to be reused; null for none.
  void* take(size_t nbytes) {
    for (auto block = cached_.rbegin(); block != cached_.rend(); ++block) {
      if (block->second == nbytes) {
        void* data = block->first;
        cached_.erase(std::next(block).base());
        return data;
      }
    }
    return nullptr;
  }

  void free(void* data, size_t nbytes) {
    if (nbytes > max_bytes_) {
      return;
    }
    cached_.emplace_back(data, nbytes);
    while (cached_bytes() > max_bytes_) {
      cached_.pop_front();
    }
  }

  size_t cached_bytes() const {
    size_t sum = 0;
    for (const auto& block : cached_) {
      sum += block.second;
    }
    return sum;
  }

 private:
  const size_t max_bytes_;
  std::list<std::pair<void*, size_t>> cached_;
};

TEST(random_blocks_are_cached_as_the_reference_has_them) {
  constexpr size_t kMaxBytes = 24 * kPage;
  std::mt19937 random(3);
  CpuBlocks blocks(kMaxBytes);
  Reference reference(kMaxBytes);
  std::vector<std::pair<void*, size_t>> used;
  for (int step = 0; step < 6000; ++step) {
    if (used.size() < 3 || (used.size() < 40 && random() % 2 == 0)) {
      const size_t nbytes = (1 + random() % (random() % 16 == 0 ? 30 : 6)) * kPage;
      void* expected = reference.take(nbytes);
      void* found = blocks.allocate(nbytes);
      CHECK(expected == nullptr || expected == found);
      used.emplace_back(found, nbytes);
    } else {
      std::swap(used[random() % used.size()], used.back());
      blocks.free(used.back().first, used.back().second);
      reference.free(used.back().first, used.back().second);
      used.pop_back();
    }
    CHECK_EQ(blocks.cached_bytes(), reference.cached_bytes());
  }
  for (const auto& block : used) {
    blocks.free(block.first, block.second);
  }
}

// --- threads --------------------------------------------------------------------------

struct Filled {
  uint64_t* data;
  size_t nbytes;
  uint64_t mark;
};

void churn(CpuBlocks& blocks, unsigned seed, size_t max_cached_bytes) {
  std::mt19937 random(seed);
  std::vector<Filled> used;
  for (int step = 0; step < 3000; ++step) {
    if (used.size() < 2 || (used.size() < 30 && random() % 2 == 0)) {
      const size_t nbytes = (1 + random() % 5) * kPage;
      const Filled block{
          static_cast<uint64_t*>(blocks.allocate(nbytes)), nbytes, seed * 1000003ULL + random()};
      std::fill_n(block.data, nbytes / sizeof(uint64_t), block.mark);
      used.push_back(block);
    } else {
      std::swap(used[random() % used.size()], used.back());
      const Filled block = used.back();
      used.pop_back();
      CHECK_EQ(
          std::count(block.data, block.data + block.nbytes / sizeof(uint64_t), block.mark),
          block.nbytes / sizeof(uint64_t));
      blocks.free(block.data, block.nbytes);
      CHECK(blocks.cached_bytes() <= max_cached_bytes);
    }
    if (random() % 512 == 0) {
      blocks.drop_cache();
    }
  }
  for (const Filled& block : used) {
    blocks.free(block.data, block.nbytes);
  }
}

void run_in_threads(const std::function<void(unsigned)>& body) {
  std::vector<std::thread> threads;
  for (unsigned seed = 1; seed <= 4; ++seed) {
    threads.emplace_back(body, seed);
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
}

TEST(threads_keep_their_blocks_apart_and_the_cache_bounded) {
  constexpr size_t kMaxBytes = 20 * kPage;
  CpuBlocks blocks(kMaxBytes);
  run_in_threads([&](unsigned seed) { churn(blocks, seed, kMaxBytes); });
}

TEST(the_cache_is_bounded_when_threads_free_at_once) {
  CpuBlocks blocks(kPage);
  run_in_threads([&](unsigned) {
    for (int step = 0; step < 10000; ++step) {
      void* first = blocks.allocate(kPage);
      blocks.free(blocks.allocate(kPage), kPage);
      CHECK(blocks.cached_bytes() <= kPage);
      blocks.free(first, kPage);
    }
  });
}

} // namespace
} // namespace torch_lms
