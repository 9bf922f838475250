#include <entity/HostPool.h>

#include <cstdint>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include <entity/Error.h>

#include "fake_slab_source.h"
#include "harness.h"

namespace torch_lms {
namespace {

constexpr size_t kPage = 4096;
constexpr size_t kMiB = size_t{1} << 20;
constexpr size_t kSlab = 8 * kMiB;

/// A pool on a fake source, with the source's record.
struct Fixture {
  explicit Fixture(size_t limit_bytes = SIZE_MAX, size_t slab_bytes = kSlab)
      : pool(std::make_unique<FakeSlabSource>(record, slab_bytes), options(limit_bytes)) {}

  static HostPoolOptions options(size_t limit_bytes) {
    HostPoolOptions options;
    options.limit_bytes = limit_bytes;
    return options;
  }

  char* take(size_t nbytes) {
    return static_cast<char*>(pool.allocate(nbytes));
  }

  SourceRecord record;
  HostPool pool;
};

// --- blocks -----------------------------------------------------------------------

TEST(sizes_are_rounded_to_the_alignment_only) {
  Fixture fixture;
  char* first = fixture.take(1);
  char* second = fixture.take(kPage + 1);
  char* third = fixture.take(0);
  CHECK_EQ(second - first, kPage);
  CHECK_EQ(third - second, 2 * kPage);
  CHECK_EQ(fixture.pool.stats().used_bytes, 4 * kPage);
  CHECK_EQ(reinterpret_cast<uintptr_t>(first) % kPage, 0);
}

TEST(smaller_alignments_waste_less) {
  SourceRecord record;
  HostPoolOptions options;
  options.alignment = 64;
  HostPool pool(std::make_unique<FakeSlabSource>(record, kSlab), options);
  char* first = static_cast<char*>(pool.allocate(65));
  CHECK_EQ(static_cast<char*>(pool.allocate(1)) - first, 128);
}

TEST(the_free_block_that_fits_best_is_taken) {
  Fixture fixture;
  char* wide = fixture.take(8 * kPage);
  fixture.take(1);
  char* narrow = fixture.take(3 * kPage);
  fixture.take(1);
  fixture.pool.free(wide);
  fixture.pool.free(narrow);
  CHECK_EQ(fixture.take(2 * kPage), narrow);
  CHECK_EQ(fixture.take(1), narrow + 2 * kPage);
  CHECK_EQ(fixture.take(4 * kPage), wide);
}

TEST(free_neighbours_join_in_any_order) {
  const std::vector<std::vector<size_t>> orders = {
      {0, 1, 2}, {0, 2, 1}, {1, 0, 2}, {1, 2, 0}, {2, 0, 1}, {2, 1, 0}};
  for (const auto& order : orders) {
    Fixture fixture;
    std::vector<char*> blocks;
    for (int i = 0; i < 3; ++i) {
      blocks.push_back(fixture.take(kPage));
    }
    fixture.take(kPage);
    for (size_t which : order) {
      fixture.pool.free(blocks[which]);
    }
    CHECK_EQ(fixture.take(3 * kPage), blocks[0]);
  }
}

TEST(blocks_never_join_across_slabs) {
  Fixture fixture;
  char* first = fixture.take(kSlab);
  char* second = fixture.take(kSlab);
  REQUIRE(second - first == static_cast<std::ptrdiff_t>(kSlab)); // or nothing is tested
  fixture.pool.free(first);
  fixture.pool.free(second);
  CHECK_EQ(fixture.take(2 * kSlab), second + kSlab);
  CHECK_EQ(fixture.record.acquired, 3);
}

TEST(freeing_null_is_nothing) {
  Fixture fixture;
  fixture.pool.free(nullptr);
  CHECK_EQ(fixture.pool.stats().used_bytes, 0);
}

// --- blocks that others can do without -------------------------------------------------

/// Holds blocks, and gives them back when it is asked.
struct Holder {
  explicit Holder(HostPool& from) : pool(from) {
    pool.set_reclaim([this](HostPool::Urgency urgency) { return give_back(urgency); });
  }
  bool give_back(HostPool::Urgency urgency) {
    asked.push_back(urgency);
    pool.stats(); // takes the pool's lock
    auto& from = urgency == HostPool::Urgency::kSpare ? spare : needed;
    if (from.empty()) {
      return false;
    }
    pool.free(from.back());
    from.pop_back();
    return true;
  }
  HostPool& pool;
  std::vector<void*> spare;
  std::vector<void*> needed;
  std::vector<HostPool::Urgency> asked;
};

TEST(spare_blocks_are_asked_for_before_the_pool_grows) {
  Fixture fixture;
  Holder holder(fixture.pool);
  char* first = fixture.take(kSlab); // the holder has none
  CHECK_EQ(holder.asked.size(), 1);
  holder.spare = {first};
  CHECK_EQ(fixture.take(kSlab), first);
  CHECK_EQ(fixture.record.acquired, 1);
  CHECK_EQ(fixture.take(2 * kSlab) != nullptr, true);
  CHECK_EQ(fixture.record.acquired, 2);
  for (const auto urgency : holder.asked) {
    CHECK(urgency == HostPool::Urgency::kSpare);
  }
}

TEST(a_block_that_fits_asks_nobody) {
  Fixture fixture;
  fixture.pool.free(fixture.take(kSlab));
  Holder holder(fixture.pool);
  fixture.take(kPage);
  CHECK(holder.asked.empty());
}

TEST(needed_blocks_are_asked_for_before_an_allocation_fails) {
  Fixture fixture(kSlab);
  Holder holder(fixture.pool);
  char* first = fixture.take(kSlab / 2);
  char* second = fixture.take(kSlab / 2);
  holder.needed = {second, first};
  char* all = fixture.take(kSlab); // as many as it takes
  CHECK_EQ(all, first);
  CHECK(holder.needed.empty());
  CHECK_THROWS(fixture.take(kSlab), HostPoolFull, "limit");
  CHECK(holder.asked.back() == HostPool::Urgency::kNeeded);
  fixture.pool.free(all);
  fixture.pool.set_reclaim(nullptr);
  holder.asked.clear();
  CHECK_THROWS(fixture.take(2 * kSlab), HostPoolFull, "limit");
  CHECK(holder.asked.empty());
}

TEST(needed_blocks_are_asked_for_where_the_source_has_no_more) {
  Fixture fixture;
  Holder holder(fixture.pool);
  char* block = fixture.take(kSlab);
  fixture.record.most_bytes = 0;
  holder.needed = {block};
  CHECK_EQ(fixture.take(kSlab), block);
  CHECK_THROWS(fixture.take(kSlab), TransferFailed, "");
  CHECK(holder.asked.back() == HostPool::Urgency::kNeeded);
}

TEST(many_threads_allocate_what_others_can_do_without) {
  Fixture fixture(2 * kMiB, 2 * kMiB);
  std::mutex mutex;
  std::vector<void*> held;
  fixture.pool.set_reclaim([&](HostPool::Urgency urgency) {
    std::lock_guard<std::mutex> lock(mutex);
    if (held.empty() || urgency == HostPool::Urgency::kSpare) {
      return false;
    }
    fixture.pool.free(held.back());
    held.pop_back();
    return true;
  });
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 500; ++i) {
        try {
          void* data = fixture.pool.allocate(kMiB / 4);
          std::lock_guard<std::mutex> lock(mutex);
          held.push_back(data);
        } catch (const HostPoolFull&) { // another thread was faster
        }
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  CHECK_EQ(fixture.pool.stats().used_bytes, held.size() * kMiB / 4);
  CHECK_EQ(held.size(), 8);
}

// --- slabs ------------------------------------------------------------------------

TEST(a_pool_that_is_not_used_has_no_slab) {
  Fixture fixture;
  CHECK_EQ(fixture.record.acquired, 0);
  CHECK_EQ(fixture.pool.stats().slab_bytes, 0);
}

TEST(slabs_are_of_the_preferred_size_or_the_requests) {
  Fixture fixture;
  fixture.take(1);
  CHECK_EQ(fixture.pool.stats().slab_bytes, kSlab);
  fixture.take(kSlab + 1);
  CHECK_EQ(fixture.pool.stats().slab_bytes, kSlab + kSlab + 2 * kMiB);
  CHECK_EQ(fixture.pool.stats().slabs, 2);
}

TEST(trim_gives_free_slabs_back) {
  Fixture fixture;
  char* first = fixture.take(kSlab);
  char* second = fixture.take(kSlab);
  char* third = fixture.take(1);
  fixture.pool.free(first);
  fixture.pool.free(second);
  fixture.pool.trim();
  CHECK_EQ(fixture.record.released, 2);
  CHECK_EQ(fixture.pool.stats().slab_bytes, kSlab);
  fixture.pool.free(third);
  fixture.pool.trim();
  CHECK_EQ(fixture.record.outstanding_bytes, 0);
  CHECK_EQ(fixture.pool.stats().slabs, 0);
}

TEST(the_destructor_gives_all_slabs_back) {
  SourceRecord record;
  {
    HostPool pool(std::make_unique<FakeSlabSource>(record, kSlab), HostPoolOptions());
    pool.allocate(1);
    pool.allocate(2 * kSlab);
  }
  CHECK_EQ(record.released, 2);
  CHECK_EQ(record.outstanding_bytes, 0);
}

// --- the limit --------------------------------------------------------------------

TEST(slabs_are_cut_to_the_limit) {
  Fixture fixture(kSlab + 3 * kMiB);
  fixture.take(kSlab);
  fixture.take(kPage); // in steps of 2 MiB where there is room for one
  CHECK_EQ(fixture.pool.stats().slab_bytes, kSlab + 2 * kMiB);
  fixture.take(2 * kMiB - kPage);
  fixture.take(kMiB); // and to the byte where there is not
  CHECK_EQ(fixture.pool.stats().slab_bytes, kSlab + 3 * kMiB);
  CHECK_EQ(fixture.record.outstanding_bytes, kSlab + 3 * kMiB);
}

TEST(a_full_pool_names_the_limit_the_use_the_need_and_the_knob) {
  Fixture fixture(kSlab);
  fixture.take(kSlab - 2 * kPage);
  const auto too_much = [&] { fixture.take(3 * kPage); };
  CHECK_THROWS(too_much(), HostPoolFull, std::to_string(3 * kPage) + " more bytes of fake memory");
  CHECK_THROWS(too_much(), HostPoolFull, "limit of " + std::to_string(kSlab));
  CHECK_THROWS(too_much(), HostPoolFull, std::to_string(kSlab - 2 * kPage) + " bytes used");
  CHECK_THROWS(too_much(), HostPoolFull, "largest free block " + std::to_string(2 * kPage));
  CHECK_THROWS(too_much(), HostPoolFull, "host_limit=");
  CHECK_THROWS(too_much(), HostPoolFull, "host_limit=");
  CHECK_EQ(fixture.pool.stats().slab_bytes, kSlab);
  fixture.take(2 * kPage);
  CHECK_EQ(fixture.pool.stats().used_bytes, kSlab);
}

TEST(free_slabs_make_way_at_the_limit) {
  Fixture fixture(3 * kSlab);
  char* first = fixture.take(kSlab);
  char* second = fixture.take(kSlab);
  fixture.take(kPage);
  fixture.pool.free(first);
  fixture.pool.free(second);
  fixture.take(2 * kSlab);
  CHECK_EQ(fixture.record.released, 2);
  CHECK_EQ(fixture.pool.stats().slab_bytes, 3 * kSlab);
  CHECK_EQ(fixture.record.peak_bytes, 3 * kSlab);
}

TEST(no_more_free_slabs_make_way_than_must) {
  Fixture fixture(3 * kSlab);
  std::vector<char*> blocks;
  for (int i = 0; i < 3; ++i) {
    blocks.push_back(fixture.take(kSlab));
  }
  fixture.pool.free(blocks[0]);
  fixture.pool.free(blocks[1]);
  fixture.pool.free(blocks[2]);
  fixture.take(kSlab + 1);
  CHECK_EQ(fixture.record.released, 2);
}

TEST(sizes_beyond_all_memory_are_refused) {
  for (size_t limit : {kSlab, SIZE_MAX - 1}) {
    Fixture fixture(limit);
    for (size_t nbytes : {SIZE_MAX, SIZE_MAX - 1, SIZE_MAX - kPage, SIZE_MAX - kPage - 1}) {
      CHECK_THROWS(fixture.take(nbytes), Error, "expected");
    }
    CHECK_EQ(fixture.pool.stats().slab_bytes, 0);
    fixture.take(1);
  }
}

TEST(a_lower_limit_releases_what_is_free) {
  Fixture fixture(4 * kSlab);
  fixture.take(kPage);
  char* block = fixture.take(2 * kSlab);
  fixture.pool.free(block);
  fixture.pool.set_limit(kSlab / 2);
  CHECK_EQ(fixture.pool.stats().slab_bytes, kSlab); // in use
  CHECK_EQ(fixture.pool.stats().limit_bytes, kSlab / 2);
  CHECK_THROWS(fixture.take(kSlab - kPage), HostPoolFull, "limit of " + std::to_string(kSlab / 2));
  fixture.take(kSlab / 2 - kPage); // a part of the slab that there is
  CHECK_THROWS(fixture.take(1), HostPoolFull, "limit of " + std::to_string(kSlab / 2));
  fixture.pool.set_limit(2 * kSlab);
  fixture.take(kSlab);
  CHECK_EQ(fixture.pool.stats().slab_bytes, 2 * kSlab);
}

// --- sources that fail ------------------------------------------------------------

TEST(a_failed_slab_is_not_counted) {
  Fixture fixture(kSlab);
  fixture.record.most_bytes = 0;
  CHECK_THROWS(fixture.take(1), TransferFailed, "");
  CHECK_EQ(fixture.pool.stats().slab_bytes, 0);
  fixture.record.most_bytes = SIZE_MAX;
  fixture.take(kSlab);
  CHECK_EQ(fixture.pool.stats().used_bytes, kSlab);
}

TEST(where_the_preferred_slab_cannot_be_had_a_smaller_one_may_do) {
  Fixture fixture;
  fixture.record.most_bytes = 2 * kMiB;
  fixture.take(kPage);
  CHECK_EQ(fixture.pool.stats().slab_bytes, 2 * kMiB);
  CHECK_THROWS(fixture.take(3 * kMiB), TransferFailed, std::to_string(4 * kMiB));
  CHECK_EQ(fixture.pool.stats().slab_bytes, 2 * kMiB);
}

TEST(another_source_takes_over_when_no_block_is_in_use) {
  SourceRecord record; // outlives the pool
  Fixture fixture;
  char* block = fixture.take(1);
  CHECK(!fixture.pool.replace_source(std::make_unique<FakeSlabSource>(record, kMiB)));
  fixture.pool.free(block);
  CHECK(fixture.pool.replace_source(std::make_unique<FakeSlabSource>(record, 2 * kSlab)));
  CHECK_EQ(fixture.record.outstanding_bytes, 0);
  CHECK_EQ(fixture.pool.stats().slab_bytes, 0);
  fixture.take(1);
  CHECK_EQ(record.outstanding_bytes, 2 * kSlab);
}

TEST(options_that_make_no_sense_are_refused) {
  for (size_t alignment : {size_t{0}, size_t{3}, size_t{4095}, size_t{8192}}) {
    HostPoolOptions options;
    options.alignment = alignment;
    SourceRecord record;
    CHECK_THROWS(
        HostPool(std::make_unique<FakeSlabSource>(record, kSlab), options),
        Error,
        "found " + std::to_string(alignment));
  }
  CHECK_THROWS(HostPool(nullptr, HostPoolOptions()), Error, "found none");
}

// --- threads ----------------------------------------------------------------------

TEST(a_slab_on_its_way_does_not_hold_up_blocks_that_fit) {
  Fixture fixture;
  char* block = fixture.take(kPage);
  fixture.record.set_hold(true);
  std::thread grower([&] { fixture.take(kSlab); });
  fixture.record.wait_for_waiting(1);
  fixture.pool.free(block);
  CHECK_EQ(fixture.take(kPage), block);
  CHECK_EQ(fixture.pool.stats().slab_bytes, 2 * kSlab);
  fixture.record.set_hold(false);
  grower.join();
}

TEST(threads_that_need_room_at_once_share_a_slab) {
  Fixture fixture(kSlab);
  fixture.record.set_hold(true);
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      try {
        fixture.take(kMiB);
      } catch (const HostPoolFull& error) { // there is room for all
        CHECK_EQ(std::string(error.what()), "");
      }
    });
  }
  fixture.record.wait_for_waiting(1);
  std::this_thread::sleep_for(std::chrono::milliseconds(20)); // let the others come
  fixture.record.set_hold(false);
  for (std::thread& thread : threads) {
    thread.join();
  }
  CHECK_EQ(fixture.record.acquired, 1);
  CHECK_EQ(fixture.pool.stats().used_bytes, 4 * kMiB);
}

TEST(a_slab_counts_until_the_source_has_it_back) {
  Fixture fixture(kSlab);
  fixture.pool.free(fixture.take(kSlab));
  fixture.record.set_hold(true);
  std::thread trimmer([&] { fixture.pool.trim(); });
  fixture.record.wait_for_waiting(1);
  CHECK_EQ(fixture.pool.stats().slab_bytes, kSlab);
  std::thread grower([&] { fixture.take(kSlab); }); // waits for the room, and does not fail
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  fixture.record.set_hold(false);
  trimmer.join();
  grower.join();
  CHECK_EQ(fixture.record.peak_bytes, kSlab);
  CHECK_EQ(fixture.pool.stats().used_bytes, kSlab);
}

} // namespace
} // namespace torch_lms
