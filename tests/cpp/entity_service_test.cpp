// Bytes that are used in place on the host, and pins beside requests.

#include <entity/EntityStorageImpl.h>

#include <atomic>
#include <chrono>
#include <mutex>
#include <thread>
#include <vector>

#include <entity/Error.h>

#include "entity_rig.h"

namespace torch_lms {
namespace {

using namespace entity_states;

// --- the host copy in place -------------------------------------------------------------

TEST(only_what_is_paged_out_serves) {
  for (Copies copies : kBothWays) {
    for (State state : kAllStates) {
      EntityRig rig(copies);
      rig.go_to(state);
      const bool serves = state == PD || state == IQ;
      CHECK_EQ(rig.entity->serve(), serves);
      CHECK_EQ(rig.entity->state(), serves ? PD : state);
      if (serves) {
        rig.entity->end_service();
      }
    }
  }
}

TEST(nothing_brings_the_bytes_in_while_they_are_used_in_place) {
  for (Copies copies : kBothWays) {
    EntityRig rig(copies);
    rig.go_to(IQ);
    REQUIRE(rig.entity->serve());
    CHECK(rig.entity->begin_pagein() == nullptr); // the queue's worker comes too late
    CHECK(!rig.entity->request_pagein());
    CHECK(!rig.entity->cancel_pagein());
    AccessResult result = AccessResult::kResident;
    CHECK(!rig.entity->touch(&result));
    CHECK_EQ(rig.entity->access(), AccessResult::kServed);
    CHECK(!rig.entity->pagein_internal_sync()); // counts as a service too
    CHECK_EQ(rig.device->interruptions.count(DeviceStep::kAllocate), 1); // of the storage itself
    rig.write(51); // by one op
    CHECK(rig.storage->holds(51)); // by the other
    rig.entity->end_service();
    rig.entity->end_service();
    CHECK_EQ(rig.entity->access(), AccessResult::kServed);
    rig.entity->end_service();
    CHECK(!rig.entity->request_pagein());
    rig.entity->end_service();
    CHECK(rig.entity->request_pagein());
    rig.check_moves_again();
  }
}

TEST(an_access_without_room_leaves_the_next_one_the_device) {
  EntityRig rig(Copies::kOnCaller);
  rig.go_to(PD);
  rig.device->most_blocks = 0;
  CHECK_THROWS(rig.entity->access(), NoRoom, "full"); // and does not serve by itself
  rig.device->most_blocks = 1;
  CHECK_EQ(rig.entity->access(), AccessResult::kPagedIn);
}

TEST(an_access_that_waited_for_a_prefetch_in_vain_is_served_beside_another) {
  EntityRig rig(Copies::kOnCaller);
  rig.go_to(IQ);
  Gate gate;
  rig.backend->interruptions.at(BackendStep::kCopyToDevice, [&] {
    gate.pass();
    throw TransferFailed("prefetch");
  });
  std::thread worker([&] { CHECK_THROWS(rig.entity->begin_pagein(), TransferFailed, "prefetch"); });
  gate.wait_until_reached();
  CHECK(!rig.entity->serve()); // the bytes are on their way
  std::thread user([&] {
    rig.device->most_blocks = 0;
    bool served = false;
    while (!served) { // as `Pager::use`
      try {
        served = rig.entity->access() == AccessResult::kServed;
      } catch (const NoRoom&) {
        served = rig.entity->serve();
      }
    }
  });
  gate.open();
  user.join();
  worker.join();
  AccessResult result = AccessResult::kResident;
  CHECK(!rig.entity->touch(&result));
  rig.entity->end_service();
  rig.device->most_blocks = 1;
}

TEST(ops_of_many_threads_without_room_work_on_one_copy) {
  EntityRig rig(Copies::kOnCaller, 0, sizeof(std::atomic<int64_t>));
  rig.go_to(PD);
  rig.storage->written = true;
  *reinterpret_cast<int64_t*>(rig.storage->data) = 0;
  constexpr int kThreads = 4;
  constexpr int kOps = 500;
  std::mutex adding; // the ops' own order
  std::atomic<int> in_place{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < kOps; ++i) {
        rig.device->most_blocks = (i + t) % 3 == 0 ? 1 : 0;
        rig.entity->pin();
        bool served = false;
        for (bool used = false; !used;) {
          try {
            served = rig.entity->access() == AccessResult::kServed;
            used = true;
          } catch (const NoRoom&) {
            used = served = rig.entity->serve();
          }
        }
        {
          std::lock_guard<std::mutex> lock(adding);
          ++*reinterpret_cast<int64_t*>(rig.storage->data);
        }
        if (served) {
          rig.entity->end_service();
          ++in_place;
        }
        rig.entity->unpin();
        if (rig.entity->state() == R) {
          rig.entity->pageout_internal_sync();
        }
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  rig.device->most_blocks = 1;
  rig.entity->access();
  CHECK_EQ(*reinterpret_cast<int64_t*>(rig.storage->data), kThreads * kOps);
  CHECK(in_place > 0); // or nothing has been tested
  rig.write(rig.seed);
}

// --- pins beside requests -----------------------------------------------------------------

TEST(a_pin_is_all_there_is_to_an_access_where_the_bytes_are_settled) {
  for (Copies copies : kBothWays) {
    for (State state : kAllStates) {
      EntityRig rig(copies);
      rig.go_to(state);
      CHECK_EQ(rig.entity->pin_settled(), state == R);
      CHECK(rig.entity->pinned()); // in either case
      rig.entity->unpin();
      CHECK(!rig.entity->pinned());
    }
  }
}

TEST(bytes_that_are_arriving_are_not_settled_until_the_copy_is_over) {
  EntityRig rig(Copies::kOnStreams);
  rig.go_to(PI);
  REQUIRE(rig.entity->commit_pagein(rig.in));
  rig.in = nullptr;
  CHECK(!rig.entity->pin_settled());
  CHECK_EQ(rig.entity->access(), AccessResult::kResident); // in order after the copy
  CHECK(rig.entity->settled());
  CHECK(rig.entity->pin_settled());
  rig.entity->unpin();
  rig.entity->unpin();
}

TEST(bytes_whose_page_out_is_being_called_off_are_not_settled) {
  EntityRig rig(Copies::kOnCaller);
  CopyBeingCalledOff copy(rig);
  CHECK(!rig.entity->pin_settled()); // the copy still reads
  rig.entity->unpin();
  copy.open();
  copy.join();
  CHECK(rig.entity->pin_settled());
  rig.entity->unpin();
}

TEST(a_pin_between_the_halves_of_a_request_refuses_it) {
  for (Copies copies : kBothWays) {
    EntityRig rig(copies);
    const auto transfer = rig.entity->begin_request();
    REQUIRE(transfer != nullptr);
    CHECK(rig.entity->pin_settled()); // nothing is under way yet
    rig.write(61); // by work that the request's fence may not cover
    rig.entity->unpin();
    CHECK(!rig.entity->finish_request(transfer));
    CHECK_EQ(rig.entity->state(), R);
    CHECK(rig.entity->settled());
    CHECK(!rig.storage->watched);
    rig.check_moves_again();
  }
}

TEST(a_pin_that_is_gone_again_when_the_fence_is_there_refuses_the_request) {
  EntityRig rig(Copies::kOnStreams);
  rig.backend->interruptions.at(BackendStep::kSubmittedWork, [&] {
    rig.entity->pin();
    rig.entity->unpin();
  });
  CHECK(!rig.entity->request_pageout());
  CHECK_EQ(rig.entity->state(), R);
  rig.check_moves_again();
}

TEST(an_abandoned_request_lets_others_in) {
  EntityRig rig(Copies::kOnCaller);
  REQUIRE(rig.entity->begin_request() != nullptr);
  CHECK(rig.entity->begin_request() == nullptr);
  rig.entity->abandon_request();
  rig.check_moves_again();
}

TEST(what_an_op_that_takes_no_lock_writes_is_in_the_copy_or_calls_it_off) {
  EntityRig rig(Copies::kOnCaller, 0, sizeof(std::atomic<int64_t>));
  auto value = [&]() -> int64_t& { return *reinterpret_cast<int64_t*>(rig.storage->data); };
  value() = 0;
  std::atomic<bool> over{false};
  std::thread pager([&] {
    while (!over) {
      rig.entity->pageout_internal_sync();
    }
  });
  constexpr int kOps = 20000;
  int64_t settled = 0;
  int64_t ops = 0;
  const auto patience_ends = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  const auto has_met_one_kind = [&] { return settled == 0 || settled == ops; };
  for (; ops < kOps || (has_met_one_kind() && std::chrono::steady_clock::now() < patience_ends);
       ++ops) {
    if (rig.entity->pin_settled()) {
      ++settled;
    } else {
      rig.entity->access();
    }
    ++value(); // a race with the copy, or lost, if the request went on
    rig.entity->unpin();
  }
  over = true;
  pager.join();
  rig.entity->access();
  CHECK_EQ(value(), ops);
  CHECK(settled > 0 && settled < ops); // or nothing has been tested
  rig.write(rig.seed);
}

// --- what the allocator is told ------------------------------------------------------------

TEST(the_allocator_is_told_of_copies_without_the_entitys_lock) {
  EntityRig rig(Copies::kOnStreams);
  const auto takes_the_lock = [&] {
    CHECK(rig.entity->pinned());
    std::thread([&] { rig.entity->settled(); }).join(); // as a thread that the allocator waits for
  };
  rig.go_to(PO);
  rig.device->interruptions.at(DeviceStep::kKeepBlock, takes_the_lock);
  CHECK_EQ(rig.entity->access(), AccessResult::kCancelledPageout);
  CHECK_EQ(rig.device->kept_for_copies.load(), 1);
  rig.drop_transfers();
  rig.go_to(PI);
  rig.device->interruptions.at(DeviceStep::kKeepBlock, takes_the_lock);
  CHECK(rig.entity->commit_pagein(rig.in));
  CHECK_EQ(rig.device->kept_for_arrivals.load(), 1);
  CHECK_EQ(rig.device->interruptions.count(DeviceStep::kKeepBlock), 2);
  rig.in = nullptr;
  CHECK(!rig.entity->pinned());
}

TEST(an_allocator_that_cannot_be_told_leaves_no_pin) {
  EntityRig rig(Copies::kOnStreams);
  rig.go_to(PO);
  rig.device->interruptions.at(DeviceStep::kKeepBlock, throwing<Error>("no memory for a stream"));
  CHECK_THROWS(rig.entity->access(), Error, "no memory");
  CHECK(!rig.entity->pinned());
  rig.backend->run_all();
  rig.drop_transfers();
  rig.go_to(PI);
  rig.device->interruptions.at(DeviceStep::kKeepBlock, throwing<Error>("no memory for a stream"));
  CHECK(rig.entity->commit_pagein(rig.in)); // it waits for the copy instead
  CHECK(!rig.entity->pinned());
  rig.backend->run_all();
  rig.in = nullptr;
  rig.check_moves_again();
}

TEST(a_page_out_that_is_asked_for_while_the_allocator_is_told_does_not_take_the_block) {
  EntityRig rig(Copies::kOnStreams);
  rig.go_to(PI);
  rig.device->interruptions.at(
      DeviceStep::kKeepBlock, [&] { CHECK(!rig.entity->request_pageout()); });
  CHECK(rig.entity->commit_pagein(rig.in));
  rig.in = nullptr;
  rig.check_moves_again();
}

} // namespace
} // namespace torch_lms
