// What fails, is used or is called off in the middle of a move: the bytes stay, and the
// next move works.

#include <entity/EntityStorageImpl.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <new>
#include <thread>

#include <entity/Error.h>

#include "entity_rig.h"
#include "other_op.h"

namespace torch_lms {
namespace {

using namespace entity_states;

// --- steps that fail ---------------------------------------------------------------------

TEST(a_request_that_fails_leaves_the_entity_resident) {
  EntityRig rig(Copies::kOnStreams);
  rig.backend->interruptions.at(BackendStep::kSubmittedWork, throwing<TransferFailed>("no fence"));
  CHECK_THROWS(rig.entity->request_pageout(), TransferFailed, "no fence");
  CHECK_EQ(rig.entity->state(), R);
  CHECK(!rig.entity->gone());
  rig.check_moves_again();
}

TEST(a_request_that_cannot_watch_the_storage_leaves_the_entity_resident) {
  EntityRig rig(Copies::kOnStreams);
  rig.device->interruptions.at(DeviceStep::kWatch, [] { throw std::bad_alloc(); });
  bool failed = false;
  try {
    rig.entity->request_pageout();
  } catch (const std::bad_alloc&) {
    failed = true;
  }
  CHECK(failed);
  CHECK_EQ(rig.entity->state(), R);
  CHECK_EQ(rig.storage.use_count(), 1); // nobody keeps it
  rig.check_moves_again();
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
    rig.check_moves_again();
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
    rig.check_moves_again();
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
      rig.check_moves_again();
    }
  }
}

TEST(a_copy_to_the_host_that_fails_on_its_stream_leaves_the_entity_resident) {
  EntityRig rig(Copies::kOnStreams);
  rig.backend->fail_next_copy();
  CHECK_THROWS(rig.entity->pageout_internal_sync(), TransferFailed, "stream");
  CHECK_EQ(rig.entity->state(), R);
  CHECK_EQ(rig.backend->hosts(), 0);
  rig.check_moves_again();
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
    rig.check_moves_again();
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
      rig.check_moves_again();
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
  rig.check_moves_again();
}

TEST(a_commit_that_cannot_tell_the_allocator_of_its_copy_waits_for_it) {
  EntityRig rig(Copies::kOnStreams);
  rig.go_to(PI);
  rig.device->interruptions.at(DeviceStep::kKeepBlock, throwing<TransferFailed>("no allocator"));
  CHECK(rig.entity->commit_pagein(rig.in));
  CHECK_EQ(rig.entity->state(), R);
  CHECK(rig.in->fence->done());
  CHECK(rig.storage->holds(rig.seed));
  rig.check_moves_again();
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
  rig.check_moves_again();
}

TEST(a_copy_waits_for_ops_that_began_before_the_entity_was_seen_or_asked_for) {
  OtherOp op;
  EntityRig seen_during(Copies::kOnCaller, OpClock::get().tick());
  EntityRig asked_for_during(Copies::kOnCaller);
  EntityRig unknown_to_ops(Copies::kOnCaller);
  CHECK(!seen_during.entity->pageout_internal_sync());
  CHECK(unknown_to_ops.entity->pageout_internal_sync());
  REQUIRE(seen_during.entity->request_pageout());
  REQUIRE(asked_for_during.entity->request_pageout(OpClock::get().tick()));
  for (EntityRig* rig : {&seen_during, &asked_for_during}) {
    CHECK(rig->entity->pageout_must_wait());
  }
  op.end();
  for (EntityRig* rig : {&seen_during, &asked_for_during}) {
    CHECK(!rig->entity->pageout_must_wait());
    CHECK(rig->entity->pageout_internal_sync());
  }
}

TEST(memory_that_an_op_replaces_after_the_request_is_not_read) {
  for (const size_t nbytes : {size_t{4099}, size_t{8192}}) { // the same, and another
    EntityRig rig(Copies::kOnCaller);
    OtherOp op;
    REQUIRE(rig.entity->request_pageout(OpClock::get().tick()));
    rig.storage->replace_memory(nbytes, rig.seed); // by the op, which has not pinned the entity
    op.end();
    CHECK(!rig.entity->pageout_must_wait());
    CHECK(!rig.entity->begin_pageout(&rig.out));
    CHECK(rig.entity->gone());
    CHECK_EQ(rig.entity->state(), R);
    CHECK(!rig.storage->watched);
    CHECK_EQ(rig.backend->interruptions.count(BackendStep::kCopyToHost), 0);
  }
}

TEST(work_that_an_op_submits_after_the_request_is_copied) {
  EntityRig rig(Copies::kOnStreams);
  OtherOp op;
  REQUIRE(rig.entity->request_pageout(OpClock::get().tick()));
  rig.write(7); // by the op, which has not pinned the entity
  op.end();
  REQUIRE(rig.entity->begin_pageout(&rig.out));
  CHECK(rig.out->after != nullptr); // taken when the op was over
  rig.wait(rig.out->fence);
  CHECK_EQ(rig.commit_out(), CommitResult::kCommitted);
  rig.out = nullptr;
}

TEST(an_access_while_a_request_takes_its_fence_refuses_the_request) {
  for (Copies copies : kBothWays) {
    EntityRig rig(copies);
    rig.backend->interruptions.at(BackendStep::kSubmittedWork, [&] { rig.entity->access(); });
    CHECK(!rig.entity->request_pageout());
    CHECK_EQ(rig.entity->state(), R);
    rig.check_moves_again();
  }
}

TEST(a_pin_while_a_request_takes_its_fence_refuses_the_request) {
  EntityRig rig(Copies::kOnStreams);
  rig.backend->interruptions.at(BackendStep::kSubmittedWork, [&] { rig.entity->pin(); });
  CHECK(!rig.entity->request_pageout());
  rig.entity->unpin();
  rig.check_moves_again();
}

TEST(device_memory_is_had_and_given_back_outside_of_the_lock) {
  for (Copies copies : kBothWays) {
    EntityRig rig(copies);
    const auto takes_the_lock = [&] { rig.entity->settled(); };
    rig.device->interruptions.at(DeviceStep::kFree, takes_the_lock);
    CHECK(rig.entity->pageout_internal_sync());
    CHECK_EQ(rig.device->interruptions.count(DeviceStep::kFree), 1);
    rig.device->interruptions.at(DeviceStep::kAllocate, takes_the_lock);
    CHECK(rig.entity->pagein_internal_sync());
  }
}

// --- page-outs that are called off -------------------------------------------------------

TEST(an_access_before_the_copy_costs_no_copy) {
  EntityRig rig(Copies::kOnCaller);
  rig.go_to(OQ);
  CHECK_EQ(rig.entity->access(), AccessResult::kCancelledPageout);
  CHECK(!rig.entity->begin_pageout(&rig.out));
  CHECK(rig.out == nullptr);
  CHECK_EQ(rig.backend->interruptions.count(BackendStep::kCopyToHost), 0);
  CHECK_EQ(rig.backend->interruptions.count(BackendStep::kAllocateHost), 0);
}

TEST(what_is_written_after_an_access_that_called_a_pageout_off_stays) {
  for (Copies copies : kBothWays) {
    for (State state : {OQ, PO}) {
      EntityRig rig(copies);
      rig.go_to(state);
      rig.entity->access();
      rig.write(23);
      rig.drop_transfers();
      CHECK(rig.storage->holds(23));
      CHECK(rig.entity->pageout_internal_sync());
    }
  }
}

TEST(the_block_of_a_called_off_copy_is_kept_until_the_copy_is_over) {
  EntityRig rig(Copies::kOnStreams);
  rig.go_to(PO);
  CHECK_EQ(rig.entity->access(), AccessResult::kCancelledPageout);
  CHECK_EQ(rig.device->kept_for_copies.load(), 1);
  CHECK_EQ(rig.commit_out(), CommitResult::kDropped);
  CHECK_EQ(rig.backend->hosts(), 1); // the copy writes to it
  rig.backend->run_all();
  CHECK_EQ(rig.backend->hosts(), 0);
}

TEST(the_block_of_a_called_off_copy_that_is_over_is_not_kept) {
  EntityRig rig(Copies::kOnStreams);
  rig.go_to(PO);
  rig.backend->run_all();
  CHECK_EQ(rig.entity->access(), AccessResult::kCancelledPageout);
  CHECK_EQ(rig.device->kept_for_copies.load(), 0);
}

TEST(an_access_while_host_memory_is_sought_calls_the_copy_off) {
  for (Copies copies : kBothWays) {
    EntityRig rig(copies);
    rig.go_to(OQ);
    rig.backend->interruptions.at(BackendStep::kAllocateHost, [&] {
      CHECK_EQ(rig.entity->access(), AccessResult::kCancelledPageout);
    });
    CHECK(rig.entity->begin_pageout(&rig.out));
    CHECK_EQ(rig.backend->interruptions.count(BackendStep::kCopyToHost), 0);
    CHECK_EQ(rig.commit_out(), CommitResult::kDropped);
    CHECK_EQ(rig.backend->hosts(), 0);
  }
}

TEST(an_access_waits_for_the_copy_that_a_worker_is_making) {
  for (Copies copies : kBothWays) {
    EntityRig rig(copies);
    rig.go_to(OQ);
    Gate gate;
    rig.backend->interruptions.at(BackendStep::kCopyToHost, gate.action());
    bool copy_is_over = false; // of two threads, if the access does not wait
    std::thread worker([&] {
      CHECK(rig.entity->begin_pageout(&rig.out));
      copy_is_over = true;
    });
    gate.wait_until_reached();
    std::thread opener([&] {
      while (rig.entity->state() != R) { // set before the access waits
        std::this_thread::yield();
      }
      gate.open();
    });
    CHECK_EQ(rig.entity->access(), AccessResult::kCancelledPageout);
    rig.write(31); // a race, if the copy went on
    opener.join();
    worker.join();
    CHECK(copy_is_over);
    CHECK_EQ(rig.commit_out(), CommitResult::kDropped);
    rig.out = nullptr;
  }
}

TEST(an_access_waits_for_the_copy_that_another_access_calls_off) {
  for (Copies copies : kBothWays) {
    EntityRig rig(copies);
    CopyBeingCalledOff copy(rig);
    CHECK(!rig.entity->settled());
    CHECK(!rig.entity->request_pageout());
    std::atomic<bool> opened{false};
    std::thread opener([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      opened = true;
      copy.open();
    });
    CHECK_EQ(rig.entity->access(), AccessResult::kResident);
    CHECK(opened);
    rig.write(31); // a race, if the copy went on
    opener.join();
    copy.join();
    CHECK_EQ(rig.commit_out(), CommitResult::kDropped);
    rig.out = nullptr;
  }
}

TEST(a_storage_is_watched_until_the_copy_that_an_access_calls_off_is_over) {
  for (Copies copies : kBothWays) {
    EntityRig rig(copies);
    CopyBeingCalledOff copy(rig);
    rig.entity->end_keeping();
    CHECK(rig.storage->watched); // or who writes now would not wait
    copy.open();
    copy.join();
    CHECK(!rig.storage->watched);
    CHECK_EQ(rig.commit_out(), CommitResult::kDropped);
    rig.out = nullptr;
  }
}

TEST(a_called_off_transfer_does_not_disturb_the_next_one) {
  for (Copies copies : kBothWays) {
    EntityRig rig(copies);
    rig.go_to(PO);
    const auto first = rig.out;
    rig.entity->access();
    rig.write(41);
    REQUIRE(rig.entity->request_pageout());
    REQUIRE(rig.entity->begin_pageout(&rig.out));
    CHECK(rig.out != first);
    rig.wait(first->fence);
    rig.wait(rig.out->fence);
    std::unique_ptr<DeviceBlock> garbage;
    CHECK_EQ(rig.entity->commit_pageout(first, &garbage), CommitResult::kDropped);
    CHECK_EQ(rig.entity->state(), PO);
    CHECK_EQ(rig.commit_out(), CommitResult::kCommitted);
    rig.out = nullptr;
    CHECK(rig.storage->holds(41));
  }
}

} // namespace
} // namespace torch_lms
