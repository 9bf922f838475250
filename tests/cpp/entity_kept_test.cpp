// Copies that the host keeps of what is in place on the device: it leaves without a copy.

#include <entity/EntityStorageImpl.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <new>
#include <random>
#include <thread>
#include <vector>

#include "entity_rig.h"

namespace torch_lms {
namespace {

using namespace entity_states;

/// Resident, with a copy that the host has kept.
struct KeptRig : EntityRig {
  explicit KeptRig(Copies copies) : EntityRig(copies) {
    device->keeps_copies = true;
    REQUIRE(entity->pageout_internal_sync());
    REQUIRE(entity->pagein_internal_sync());
    REQUIRE(entity->keeps_copy());
  }
  ~KeptRig() {
    entity->release_copy();
  }
  bool drop() {
    std::unique_ptr<DeviceBlock> garbage;
    const bool dropped = entity->drop_unwritten(&garbage);
    CHECK_EQ(garbage != nullptr, dropped);
    return dropped;
  }
};

TEST(a_copy_that_comes_while_a_pageout_is_requested_is_given_back) {
  for (Copies copies : kBothWays) {
    KeptRig rig(copies);
    rig.device->interruptions.at(DeviceStep::kHold, [&rig] { // what another thread does
      REQUIRE(rig.entity->pageout_internal_sync());
      rig.entity->access();
      REQUIRE(rig.entity->keeps_copy());
    });
    rig.go_to(PD);
    CHECK_EQ(rig.backend->hosts(), 1);
    rig.entity->access();
  }
}

TEST(what_nobody_has_written_leaves_without_a_copy) {
  for (Copies copies : kBothWays) {
    KeptRig rig(copies);
    rig.check_intact();
    CHECK_EQ(rig.backend->hosts(), 1);
    CHECK(rig.drop());
    CHECK_EQ(rig.entity->state(), PD);
    CHECK_EQ(rig.device->blocks.load(), 0);
    CHECK(rig.storage->watched);
    CHECK(!rig.entity->keeps_copy()); // it is the storage's now
    CHECK(rig.storage->holds(rig.seed));
    CHECK_EQ(rig.backend->interruptions.count(BackendStep::kCopyToHost), 1); // the first time
    rig.check_intact();
    CHECK(rig.drop()); // and once more
    rig.write(71); // in place
    rig.check_intact();
  }
}

/// Who finds it gone forgets it until it comes.
TEST(what_may_stay_after_all_is_not_taken_for_gone) {
  for (Copies copies : kBothWays) {
    KeptRig rig(copies);
    State seen = R;
    rig.device->interruptions.at(DeviceStep::kInstallHost, [&] {
      seen = rig.entity->state();
      throw std::bad_alloc();
    });
    CHECK(!rig.drop());
    CHECK_EQ(seen, PO);
    CHECK_EQ(rig.entity->state(), R);
    CHECK(rig.drop());
  }
}

/// Note [Blocks that go before they are filled]
TEST(what_nobody_has_written_leaves_while_it_is_still_coming_in) {
  KeptRig rig(Copies::kOnStreams);
  REQUIRE(rig.drop());
  REQUIRE(rig.entity->request_pagein());
  rig.in = rig.entity->begin_pagein();
  REQUIRE(rig.in != nullptr);
  REQUIRE(rig.entity->commit_pagein(rig.in));
  REQUIRE(rig.entity->arrival() != nullptr);
  REQUIRE(rig.entity->keeps_copy());
  CHECK_EQ(rig.device->kept_for_arrivals.load(), 1);
  CHECK(rig.drop());
  CHECK_EQ(rig.entity->state(), PD);
  CHECK(rig.storage->holds(rig.seed));
  CHECK_EQ(rig.backend->interruptions.count(BackendStep::kCopyToHost), 1); // the first time
  CHECK_EQ(rig.backend->hosts(), 1);
  rig.check_intact();
}

TEST(what_has_been_written_leaves_with_a_copy) {
  for (Copies copies : kBothWays) {
    KeptRig rig(copies);
    rig.write(73);
    CHECK(!rig.drop());
    CHECK_EQ(rig.entity->state(), R);
    CHECK(rig.entity->pageout_internal_sync());
    CHECK_EQ(rig.backend->hosts(), 1); // the stale one has gone back
    CHECK(rig.storage->holds(73));
  }
}

TEST(what_is_pinned_or_asked_for_is_not_dropped) {
  KeptRig rig(Copies::kOnStreams);
  rig.entity->pin();
  CHECK(!rig.drop());
  CHECK(rig.entity->settled()); // as if nothing had been
  rig.entity->unpin();
  CHECK(rig.drop());
  rig.check_intact();
  rig.backend->interruptions.at(BackendStep::kSubmittedWork, [&] { CHECK(!rig.drop()); });
  CHECK(rig.entity->request_pageout());
  CHECK(!rig.drop());
}

TEST(a_drop_that_finds_no_memory_leaves_the_entity_where_it_is) {
  KeptRig rig(Copies::kOnCaller);
  rig.device->interruptions.at(DeviceStep::kInstallHost, [] { throw std::bad_alloc(); });
  CHECK(!rig.drop());
  CHECK_EQ(rig.entity->state(), R);
  CHECK(rig.entity->settled());
  CHECK(rig.entity->keeps_copy());
  CHECK(rig.drop());
}

TEST(a_copy_is_given_back_once) {
  KeptRig rig(Copies::kOnStreams);
  CHECK(rig.entity->release_copy());
  CHECK(!rig.entity->release_copy());
  CHECK(!rig.drop());
  rig.backend->run_all();
  CHECK_EQ(rig.backend->hosts(), 0);
}

TEST(the_copy_of_bytes_that_are_still_arriving_lasts_until_they_have) {
  EntityRig rig(Copies::kOnStreams);
  rig.device->keeps_copies = true;
  rig.go_to(PI);
  REQUIRE(rig.entity->commit_pagein(rig.in));
  CHECK(rig.entity->release_copy());
  CHECK(!rig.in->fence->done());
  CHECK_EQ(rig.backend->hosts(), 1);
  rig.backend->run_all();
  CHECK_EQ(rig.backend->hosts(), 0);
}

TEST(who_looks_at_more_than_the_bytes_gets_an_ordinary_block) {
  KeptRig rig(Copies::kOnCaller);
  rig.entity->pin();
  rig.entity->stop_watching();
  rig.entity->unpin();
  CHECK(!rig.storage->block_watched);
  CHECK(!rig.entity->keeps_copy());
  CHECK_EQ(rig.backend->hosts(), 0);
  rig.go_to(PD);
  rig.entity->stop_watching(); // nothing is kept, and raw access is still to be seen
  CHECK(rig.storage->watched);
}

TEST(a_block_that_an_op_uses_stays_as_it_is_when_its_copy_goes) {
  KeptRig rig(Copies::kOnCaller);
  rig.entity->pin();
  rig.entity->end_keeping();
  CHECK(!rig.entity->keeps_copy());
  CHECK(rig.storage->block_watched);
  rig.entity->unpin();
  CHECK(rig.entity->pin_settled());
  rig.entity->unpin();
  rig.entity->end_keeping();
  CHECK(!rig.storage->block_watched);
}

TEST(a_block_that_is_watched_again_stays_as_it_is_when_its_copy_goes) {
  KeptRig rig(Copies::kOnCaller);
  bool again = true;
  rig.entity->end_keeping([&] { return again; });
  CHECK(!rig.entity->keeps_copy());
  CHECK(rig.storage->block_watched);
  again = false;
  rig.entity->end_keeping([&] { return again; });
  CHECK(!rig.storage->block_watched);
}

TEST(an_op_that_begins_while_its_block_changes_waits) {
  KeptRig rig(Copies::kOnCaller);
  Gate gate;
  rig.device->interruptions.at(DeviceStep::kUnwatch, gate.action());
  std::thread changes([&] { rig.entity->end_keeping(); });
  gate.wait_until_reached();
  CHECK(!rig.entity->pin_settled()); // so it asks for the lock
  gate.open();
  rig.entity->access();
  CHECK(!rig.storage->block_watched);
  rig.entity->unpin();
  changes.join();
}

TEST(what_nobody_holds_any_more_is_not_dropped) {
  struct NeverMade final : Recipe {
    std::unique_ptr<DeviceBlock> make(FencePtr*) override {
      return nullptr;
    }
  };
  EntityRig rig(Copies::kOnCaller);
  rig.device->interruptions.at(DeviceStep::kReferenced, [&rig] { rig.storage = nullptr; });
  std::unique_ptr<DeviceBlock> garbage;
  char unreadable = 0;
  CHECK(!rig.entity->drop(std::make_shared<NeverMade>(), &unreadable, &garbage));
  CHECK(garbage == nullptr);
  CHECK_EQ(rig.entity->state(), R);
}

TEST(a_kept_copy_goes_with_its_entity_or_its_storages_memory) {
  for (Copies copies : kBothWays) {
    KeptRig died(copies);
    died.storage = nullptr;
    CHECK(died.entity->keeps_copy());
    CHECK(!died.drop());
    CHECK(died.entity->release_copy()); // its pool wants it
    KeptRig replaced(copies);
    replaced.storage->replace_memory(64, 77);
    CHECK(!replaced.drop());
    replaced.storage = nullptr;
  }
}

TEST(copies_are_dropped_written_and_given_back_by_many_threads) {
  KeptRig rig(Copies::kOnCaller);
  std::atomic<bool> over{false};
  std::atomic<int> drops{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 2; ++t) {
    threads.emplace_back([&] {
      while (!over) {
        if (rig.entity->keeps_copy() && rig.drop()) {
          ++drops;
        }
      }
    });
  }
  threads.emplace_back([&] {
    while (!over) {
      rig.entity->release_copy(); // the pool needs it
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
  });
  std::mt19937 random(3);
  for (int i = 0; i < 3000; ++i) {
    rig.entity->pin();
    rig.entity->access();
    CHECK(rig.storage->holds(rig.seed));
    if (i % 4 == 0) {
      rig.write(random()); // notes it before it writes
      rig.entity->release_copy();
    }
    rig.entity->unpin();
    if (i % 8 == 0) {
      rig.entity->pageout_internal_sync();
    }
    std::this_thread::yield();
  }
  over = true;
  for (std::thread& thread : threads) {
    thread.join();
  }
  CHECK(drops > 0); // or nothing has been tested
}

} // namespace
} // namespace torch_lms
