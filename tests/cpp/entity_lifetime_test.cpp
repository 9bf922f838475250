// Storages that die, or are given other memory, while their bytes are on the move.

#include <entity/EntityStorageImpl.h>

#include <memory>
#include <new>
#include <thread>

#include <entity/Error.h>

#include "entity_rig.h"

namespace torch_lms {
namespace {

using namespace entity_states;

// --- storages that die, or are given other memory ----------------------------------------------

TEST(a_storage_may_die_in_every_state) {
  for (Copies copies : kBothWays) {
    for (State state : kAllStates) {
      EntityRig rig(copies);
      rig.go_to(state);
      rig.storage = nullptr;
      if (state == OQ) {
        CHECK(!rig.entity->begin_pageout(&rig.out));
      }
      rig.drop_transfers();
      CHECK(rig.entity->gone());
      CHECK_EQ(rig.entity->state(), R);
      CHECK(rig.entity->hold() == nullptr);
      CHECK(rig.entity->device_address() == nullptr);
      CHECK(!rig.entity->request_pageout());
      CHECK(!rig.entity->request_pagein());
      CHECK(rig.entity->begin_pagein() == nullptr);
      CHECK(!rig.entity->pageout_internal_sync());
    }
  }
}

TEST(a_storage_may_be_given_other_memory_in_every_state) {
  for (Copies copies : kBothWays) {
    for (State state : kAllStates) {
      for (size_t nbytes : {size_t{64}, size_t{4099}}) {
        EntityRig rig(copies);
        rig.go_to(state);
        if (rig.out != nullptr) {
          rig.wait(rig.out->fence); // the old block goes at once
        }
        rig.storage->replace_memory(nbytes, 77);
        rig.drop_transfers();
        rig.backend->run_all();
        if (state == R || state == OQ) {
          rig.storage = nullptr; // nobody has told the entity
          continue;
        }
        CHECK_EQ(rig.entity->state(), R);
        CHECK(rig.entity->gone());
        CHECK(rig.storage->holds(77));
        CHECK_EQ(rig.backend->hosts(), 0);
        rig.storage = nullptr;
      }
    }
  }
}

TEST(a_storage_whose_size_has_changed_is_not_moved) {
  EntityRig rig(Copies::kOnCaller);
  rig.storage->replace_memory(64, 77);
  CHECK(!rig.entity->request_pageout());
  CHECK(rig.entity->gone());
  CHECK(rig.storage->holds(77));
  rig.storage = nullptr;
}

TEST(what_only_a_pageout_holds_is_leaving) {
  for (const EntityState state : {EntityState::kOutQueued, EntityState::kPagingOut}) {
    EntityRig rig(Copies::kOnStreams);
    rig.go_to(state);
    CHECK(!rig.entity->is_leaving());
    rig.storage = nullptr;
    CHECK(rig.entity->is_leaving());
    CHECK(!rig.entity->gone());
  }
  {
    EntityRig rig(Copies::kOnStreams);
    rig.go_to(EntityState::kOutQueued);
    rig.storage = nullptr;
    std::shared_ptr<PageoutTransfer> transfer;
    CHECK(!rig.entity->begin_pageout(&transfer)); // nothing is to be copied
    CHECK(rig.entity->gone());
    CHECK(rig.entity->is_leaving());
    transfer = nullptr;
    rig.out = nullptr;
    CHECK(!rig.entity->is_leaving());
  }
  EntityRig rig(Copies::kOnStreams);
  rig.storage = nullptr;
  CHECK(!rig.entity->is_leaving());
  CHECK(rig.entity->gone());
}

TEST(a_storage_that_dies_during_its_pagein_waits_for_the_copy) {
  EntityRig rig(Copies::kOnCaller);
  rig.go_to(IQ);
  Gate gate;
  rig.backend->interruptions.at(BackendStep::kCopyToDevice, gate.action());
  std::thread worker([&] { rig.in = rig.entity->begin_pagein(); });
  gate.wait_until_reached();
  std::thread owner([&] { rig.storage = nullptr; }); // frees the host copy
  while (!rig.entity->gone()) {
    std::this_thread::yield();
  }
  gate.open();
  owner.join();
  worker.join();
  CHECK(!rig.entity->commit_pagein(rig.in));
  rig.in = nullptr;
  CHECK_EQ(rig.entity->state(), R);
}

TEST(a_host_copy_that_is_freed_outlives_the_work_that_uses_it_in_place) {
  EntityRig rig(Copies::kOnStreams);
  rig.go_to(PD);
  rig.storage = nullptr;
  CHECK_EQ(rig.backend->hosts(), 1);
  rig.backend->run_all();
  CHECK_EQ(rig.backend->hosts(), 0);
}

TEST(a_device_in_error_leaks_a_host_copy_and_goes_on) {
  EntityRig rig(Copies::kOnStreams);
  rig.go_to(PD);
  void* host = rig.storage->data;
  rig.backend->interruptions.at(BackendStep::kSubmittedWork, throwing<TransferFailed>("error"));
  rig.storage = nullptr;
  CHECK_EQ(rig.entity->state(), R);
  CHECK_EQ(rig.backend->hosts(), 1);
  rig.backend->free_host(host, nullptr);
}

TEST(a_request_under_way_keeps_others_out) {
  EntityRig rig(Copies::kOnCaller);
  rig.backend->interruptions.at(BackendStep::kSubmittedWork, [&] {
    CHECK(!rig.entity->request_pageout());
    CHECK(!rig.entity->pageout_internal_sync());
  });
  CHECK(rig.entity->request_pageout());
  CHECK_EQ(rig.entity->state(), OQ);
  CHECK(!rig.entity->gone());
  rig.check_moves_again();
}

TEST(a_request_that_fails_lets_others_in) {
  EntityRig rig(Copies::kOnCaller);
  rig.backend->interruptions.at(BackendStep::kSubmittedWork, throwing<TransferFailed>("error"));
  CHECK_THROWS(rig.entity->request_pageout(), TransferFailed, "error");
  CHECK_EQ(rig.entity->state(), R);
  rig.check_moves_again();
}

TEST(a_commit_that_throws_leaves_a_pageout_that_can_be_called_off) {
  EntityRig rig(Copies::kOnCaller);
  rig.go_to(PO);
  rig.device->interruptions.at(DeviceStep::kInstallHost, [] { throw std::bad_alloc(); });
  CHECK_THROWS(rig.commit_out(), std::bad_alloc, "");
  rig.check_moves_again();
}

TEST(a_storage_that_dies_before_its_arrival_keeps_the_block_for_the_copy) {
  EntityRig rig(Copies::kOnStreams);
  rig.go_to(PI);
  CHECK(rig.entity->commit_pagein(rig.in));
  rig.in = nullptr;
  rig.storage = nullptr;
  CHECK_EQ(rig.device->kept_for_arrivals.load(), 1);
}

TEST(a_prefetch_for_a_storage_that_has_died_keeps_the_block_for_the_copy) {
  EntityRig rig(Copies::kOnStreams);
  rig.go_to(PI);
  const FencePtr copy = rig.in->fence;
  rig.storage = nullptr;
  rig.in = nullptr;
  CHECK(copy->done() || rig.device->blocks.load() == 1);
}

TEST(an_access_while_a_storage_is_given_other_memory_waits_for_it) {
  EntityRig rig(Copies::kOnCaller);
  rig.go_to(IQ);
  Gate gate;
  rig.backend->interruptions.at(BackendStep::kCopyToDevice, gate.action());
  std::thread worker([&] { rig.in = rig.entity->begin_pagein(); });
  gate.wait_until_reached();
  std::thread owner([&] { rig.storage->replace_memory(64, 77); });
  while (!rig.entity->gone()) {
    std::this_thread::yield();
  }
  std::thread user([&] { CHECK_EQ(rig.entity->access(), AccessResult::kResident); });
  gate.open();
  user.join();
  owner.join();
  worker.join();
  rig.storage = nullptr;
}

} // namespace
} // namespace torch_lms
