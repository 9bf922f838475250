// What fails, what dies and what is in use in the middle of a move: the bytes stay, and
// the next move works.

#include <entity/EntityStorageImpl.h>

#include <functional>
#include <memory>
#include <new>
#include <thread>

#include <entity/Error.h>

#include "disabled.h"
#include "entity_rig.h"

namespace torch_lms {
namespace {

using State = EntityState;
constexpr State R = State::kResident;
constexpr State OQ = State::kOutQueued;
constexpr State PO = State::kPagingOut;
constexpr State PD = State::kPagedOut;
constexpr State IQ = State::kInQueued;
constexpr State PI = State::kPagingIn;

/// The two directions work, with bytes that are new.
void check_moves_again(EntityRig& rig) {
  rig.check_intact();
  rig.write(rig.seed + 1);
  CHECK(rig.entity->pageout_internal_sync());
  CHECK(rig.storage->holds(rig.seed));
  CHECK(rig.entity->pagein_internal_sync());
  rig.check_intact();
}

// --- steps that fail ---------------------------------------------------------------------

TEST(a_request_that_fails_leaves_the_entity_resident) {
  EntityRig rig(Copies::kOnStreams);
  rig.backend->interruptions.at(BackendStep::kSubmittedWork, throwing<TransferFailed>("no fence"));
  CHECK_THROWS(rig.entity->request_pageout(), TransferFailed, "no fence");
  CHECK_EQ(rig.entity->state(), R);
  CHECK(!rig.entity->gone());
  check_moves_again(rig);
}

TEST(a_pageout_without_host_memory_leaves_the_entity_resident) {
  for (Copies copies : kBothWays) {
    EntityRig rig(copies);
    rig.backend->set_most_hosts(0);
    rig.go_to(OQ);
    CHECK_THROWS(rig.entity->begin_pageout(&rig.out), HostPoolFull, "full");
    CHECK(rig.out != nullptr); // its owner lets go of the storage
    CHECK_EQ(rig.entity->state(), R);
    CHECK(!rig.storage->watched);
    CHECK_EQ(rig.commit_out(), CommitResult::kDropped);
    rig.out = nullptr;
    rig.backend->set_most_hosts(1);
    check_moves_again(rig);
  }
}

TEST(a_pageout_whose_copy_fails_midway_leaves_the_entity_resident) {
  for (Copies copies : kBothWays) {
    EntityRig rig(copies);
    rig.backend->interruptions.at(BackendStep::kCopyToHost, throwing<TransferFailed>("midway"));
    rig.go_to(OQ);
    CHECK_THROWS(rig.entity->begin_pageout(&rig.out), TransferFailed, "midway");
    CHECK_EQ(rig.entity->state(), R);
    CHECK_EQ(rig.backend->hosts(), 0);
    CHECK_EQ(rig.commit_out(), CommitResult::kDropped);
    rig.out = nullptr;
    check_moves_again(rig);
  }
}

TEST(whatever_a_backend_throws_ends_a_pageout_in_resident) {
  const std::function<void()> thrown[] = {
      throwing<SpillFailed>("disk full"),
      throwing<std::logic_error>("not of ours"),
      [] { throw std::bad_alloc(); },
      [] { throw 7; },
  };
  for (const auto& action : thrown) {
    for (BackendStep step : {BackendStep::kAllocateHost, BackendStep::kCopyToHost}) {
      EntityRig rig(Copies::kOnCaller);
      rig.backend->interruptions.at(step, action);
      bool threw = false;
      try {
        rig.entity->pageout_internal_sync();
      } catch (...) {
        threw = true;
      }
      CHECK(threw);
      CHECK_EQ(rig.entity->state(), R);
      check_moves_again(rig);
    }
  }
}

TEST(a_copy_to_the_host_that_fails_on_its_stream_leaves_the_entity_resident) {
  EntityRig rig(Copies::kOnStreams);
  rig.backend->fail_next_copy();
  CHECK_THROWS(rig.entity->pageout_internal_sync(), TransferFailed, "stream");
  CHECK_EQ(rig.entity->state(), R);
  CHECK_EQ(rig.backend->hosts(), 0);
  check_moves_again(rig);
}

TEST(a_failed_copy_that_was_called_off_gives_its_host_memory_back) {
  for (Copies copies : kBothWays) {
    EntityRig rig(copies);
    rig.go_to(PO);
    rig.entity->access();
    rig.entity->abandon_pageout(rig.out);
    CHECK_EQ(rig.entity->state(), R);
    rig.backend->run_all();
    CHECK_EQ(rig.backend->hosts(), 0);
    rig.out = nullptr;
  }
}

TEST(an_access_during_a_copy_that_fails_gets_the_device_bytes) {
  EntityRig rig(Copies::kOnCaller);
  rig.go_to(OQ);
  Gate gate;
  rig.backend->interruptions.at(BackendStep::kCopyToHost, [&] {
    gate.pass();
    throw TransferFailed("after an access");
  });
  std::thread worker(
      [&] { CHECK_THROWS(rig.entity->begin_pageout(&rig.out), TransferFailed, "after"); });
  gate.wait_until_reached();
  std::thread user([&] { rig.check_intact(); });
  gate.open();
  user.join();
  worker.join();
  CHECK_EQ(rig.backend->hosts(), 0);
}

TEST(a_pagein_without_room_leaves_the_host_copy_in_use) {
  for (Copies copies : kBothWays) {
    EntityRig rig(copies);
    rig.go_to(IQ);
    rig.device->most_blocks = 0;
    CHECK_THROWS(rig.entity->begin_pagein(), NoRoom, "full");
    CHECK_EQ(rig.entity->state(), PD);
    CHECK(rig.storage->holds(rig.seed));
    CHECK_THROWS(rig.entity->access(), NoRoom, "full");
    CHECK_THROWS(rig.entity->pagein_internal_sync(), NoRoom, "full");
    CHECK_EQ(rig.entity->state(), PD);
    rig.write(91); // an op in place
    rig.device->most_blocks = 1;
    check_moves_again(rig);
  }
}

TEST(a_pagein_whose_copy_fails_midway_gives_its_block_back) {
  for (Copies copies : kBothWays) {
    for (BackendStep step : {BackendStep::kCopyToDevice, BackendStep::kSubmittedWork}) {
      EntityRig rig(copies);
      rig.go_to(PD);
      rig.backend->interruptions.at(step, throwing<TransferFailed>("midway"));
      CHECK_THROWS(rig.entity->access(), TransferFailed, "midway");
      CHECK_EQ(rig.entity->state(), PD);
      CHECK_EQ(rig.device->blocks.load(), 0);
      CHECK(rig.storage->holds(rig.seed));
      check_moves_again(rig);
    }
  }
}

TEST(an_access_that_waited_for_a_failing_prefetch_pages_in_itself) {
  EntityRig rig(Copies::kOnCaller);
  rig.go_to(IQ);
  Gate gate;
  rig.backend->interruptions.at(BackendStep::kCopyToDevice, [&] {
    gate.pass();
    throw TransferFailed("prefetch");
  });
  std::thread worker([&] { CHECK_THROWS(rig.entity->begin_pagein(), TransferFailed, "prefetch"); });
  gate.wait_until_reached();
  std::thread user([&] { CHECK_EQ(rig.entity->access(), AccessResult::kPagedIn); });
  gate.open();
  user.join();
  worker.join();
  CHECK(rig.storage->holds(rig.seed));
}

TEST(an_order_that_fails_after_an_arrival_is_given_again) {
  EntityRig rig(Copies::kOnStreams);
  rig.go_to(PD);
  rig.backend->interruptions.at(BackendStep::kOrderAfter, throwing<TransferFailed>("no order"));
  CHECK_THROWS(rig.entity->access(), TransferFailed, "no order");
  CHECK_EQ(rig.entity->state(), R);
  check_moves_again(rig);
}

TEST(an_arrival_that_cannot_be_called_off_stays_on_its_way) {
  EntityRig rig(Copies::kOnStreams);
  rig.go_to(PI);
  rig.backend->interruptions.at(BackendStep::kOrderAfter, throwing<TransferFailed>("no order"));
  CHECK_THROWS(rig.entity->cancel_arrival(rig.in), TransferFailed, "no order");
  CHECK_EQ(rig.entity->state(), PI);
  CHECK_EQ(rig.entity->access(), AccessResult::kPrefetched);
}

// --- storages in use ------------------------------------------------------------------------

TEST(a_pinned_entity_is_not_committed_until_the_last_pin_is_gone) {
  for (Copies copies : kBothWays) {
    EntityRig rig(copies);
    rig.go_to(PO);
    rig.wait(rig.out->fence);
    rig.entity->pin();
    rig.entity->pin();
    CHECK_EQ(rig.commit_out(), CommitResult::kInUse);
    rig.entity->unpin();
    CHECK(rig.entity->pinned());
    CHECK_EQ(rig.commit_out(), CommitResult::kInUse);
    CHECK_EQ(rig.entity->state(), PO);
    rig.entity->unpin();
    CHECK(!rig.entity->pinned());
    CHECK_EQ(rig.commit_out(), CommitResult::kCommitted);
    rig.out = nullptr;
  }
}

TEST(a_pin_before_the_copy_undoes_a_whole_pageout) {
  EntityRig rig(Copies::kOnCaller);
  rig.backend->interruptions.at(BackendStep::kCopyToHost, [&] { rig.entity->pin(); });
  CHECK(!rig.entity->pageout_internal_sync());
  CHECK_EQ(rig.entity->state(), R);
  CHECK_EQ(rig.backend->hosts(), 0);
  rig.entity->unpin();
  check_moves_again(rig);
}

TEST(an_op_that_began_before_the_entity_was_seen_holds_a_commit_back) {
  Gate running;
  std::thread op([&] {
    OpClock::get().begin_op();
    running.pass();
    OpClock::get().end_op();
  });
  running.wait_until_reached();
  EntityRig seen_during(Copies::kOnCaller, OpClock::get().tick());
  EntityRig unknown_to_ops(Copies::kOnCaller, 0);
  seen_during.go_to(PO);
  CHECK_EQ(seen_during.commit_out(), CommitResult::kInUse);
  CHECK(unknown_to_ops.entity->pageout_internal_sync());
  running.open();
  op.join();
  CHECK_EQ(seen_during.commit_out(), CommitResult::kCommitted);
  seen_during.out = nullptr;
}

TEST(an_access_while_a_request_takes_its_fence_refuses_the_request) {
  for (Copies copies : kBothWays) {
    EntityRig rig(copies);
    rig.backend->interruptions.at(BackendStep::kSubmittedWork, [&] { rig.entity->access(); });
    CHECK(!rig.entity->request_pageout());
    CHECK_EQ(rig.entity->state(), R);
    check_moves_again(rig);
  }
}

TEST(a_pin_while_a_request_takes_its_fence_refuses_the_request) {
  EntityRig rig(Copies::kOnStreams);
  rig.backend->interruptions.at(BackendStep::kSubmittedWork, [&] { rig.entity->pin(); });
  CHECK(!rig.entity->request_pageout());
  rig.entity->unpin();
  check_moves_again(rig);
}

TEST(device_memory_is_had_and_given_back_outside_of_the_lock) {
  for (Copies copies : kBothWays) {
    EntityRig rig(copies);
    const auto takes_the_lock = [&] { rig.entity->host_data(); };
    rig.device->interruptions.at(DeviceStep::kFree, takes_the_lock);
    CHECK(rig.entity->pageout_internal_sync());
    CHECK_EQ(rig.device->interruptions.count(DeviceStep::kFree), 1);
    rig.device->interruptions.at(DeviceStep::kAllocate, takes_the_lock);
    CHECK(rig.entity->pagein_internal_sync());
  }
}

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
  void* host = rig.entity->host_data();
  rig.backend->interruptions.at(BackendStep::kSubmittedWork, throwing<TransferFailed>("error"));
  rig.storage = nullptr;
  CHECK_EQ(rig.entity->state(), R);
  CHECK_EQ(rig.backend->hosts(), 1);
  rig.backend->free_host(host, nullptr);
}

// --- not right yet ---------------------------------------------------------------------------

// Disabled: between the first check and `acquire` another thread may page the entity out.
// `acquire` finds the host copy then, and the entity counts as gone for ever.
DISABLED_TEST(a_request_that_another_pageout_overtakes_is_refused_and_no_more) {
  EntityRig rig(Copies::kOnCaller);
  rig.device->interruptions.at(
      DeviceStep::kAcquire, [&] { CHECK(rig.entity->pageout_internal_sync()); });
  CHECK(!rig.entity->request_pageout());
  CHECK_EQ(rig.entity->state(), PD);
  CHECK(!rig.entity->gone());
  rig.check_intact();
  CHECK(rig.entity->request_pageout());
}

// Disabled: a round trip without an access, between `acquire` and the last check, is not
// noticed; the copy then reads the block that has been given back.
DISABLED_TEST(a_request_that_a_round_trip_overtakes_is_refused) {
  EntityRig rig(Copies::kOnCaller);
  rig.backend->interruptions.at(BackendStep::kSubmittedWork, [&] {
    rig.go_to(PI);
    CHECK(rig.entity->commit_pagein(rig.in));
  });
  CHECK(!rig.entity->request_pageout());
  CHECK_EQ(rig.entity->state(), R);
  check_moves_again(rig);
}

// Disabled: `commit_pageout` forgets the transfer before `install_host`, which may find no
// memory for its mark; the next access then cancels a transfer that is null.
DISABLED_TEST(a_commit_that_throws_leaves_a_pageout_that_can_be_called_off) {
  EntityRig rig(Copies::kOnCaller);
  rig.go_to(PO);
  rig.device->interruptions.at(DeviceStep::kInstallHost, [] { throw std::bad_alloc(); });
  CHECK_THROWS(rig.commit_out(), std::bad_alloc, "");
  check_moves_again(rig);
}

// Disabled: nothing orders the end of a block behind the copy that fills it, unless
// somebody has used the bytes; the block's next owner is overwritten.
DISABLED_TEST(a_storage_that_dies_before_its_arrival_keeps_the_block_for_the_copy) {
  EntityRig rig(Copies::kOnStreams);
  rig.go_to(PI);
  CHECK(rig.entity->commit_pagein(rig.in));
  rig.in = nullptr;
  rig.storage = nullptr;
  CHECK_EQ(rig.device->kept_for_copies.load(), 1);
}

// Disabled: the same for a prefetch whose owner drops it because the storage is gone.
DISABLED_TEST(a_prefetch_for_a_storage_that_has_died_keeps_the_block_for_the_copy) {
  EntityRig rig(Copies::kOnStreams);
  rig.go_to(PI);
  const FencePtr copy = rig.in->fence;
  rig.storage = nullptr;
  rig.in = nullptr;
  CHECK(copy->done() || rig.device->blocks.load() == 1);
}

// Disabled: while a release waits for a page-in to be submitted, the state is PAGING_IN
// without a transfer, which an access does not expect.
DISABLED_TEST(an_access_while_a_storage_is_given_other_memory_waits_for_it) {
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
