#include <entity/EntityStorageImpl.h>

#include <functional>
#include <memory>
#include <vector>

#include "entity_rig.h"

namespace torch_lms {
namespace {

using namespace entity_states;

/// A call, and for each state that it finds: what it returns, and the state it leaves.
struct Move {
  const char* name;
  std::function<bool(EntityRig&)> call;
  bool result[6];
  State next[6];
};

void check_moves(const std::vector<Move>& moves) {
  for (const Move& move : moves) {
    for (Copies copies : kBothWays) {
      for (size_t i = 0; i < 6; ++i) {
        EntityRig rig(copies);
        rig.go_to(kAllStates[i]);
        const bool result = move.call(rig);
        const State next = rig.entity->state();
        if (result != move.result[i] || next != move.next[i]) {
          CHECK(result == move.result[i]);
          CHECK(next == move.next[i]);
          std::fprintf(
              stderr,
              "  %s in %s led to %s\n",
              move.name,
              to_string(kAllStates[i]),
              to_string(next));
        }
      }
    }
  }
}

bool accesses_with(EntityRig& rig, AccessResult expected) {
  return rig.entity->access() == expected;
}

// --- every call in every state -------------------------------------------------------

TEST(each_step_of_a_pageout_is_taken_from_its_state_alone) {
  check_moves({
      {"request_pageout",
       [](EntityRig& rig) { return rig.entity->request_pageout(); },
       {true, false, false, false, false, false},
       {OQ, OQ, PO, PD, IQ, PI}},
      {"request_pageout of a pinned entity",
       [](EntityRig& rig) {
         rig.entity->pin();
         return rig.entity->request_pageout();
       },
       {false, false, false, false, false, false},
       {R, OQ, PO, PD, IQ, PI}},
      {"begin_pageout",
       [](EntityRig& rig) {
         std::shared_ptr<PageoutTransfer> transfer;
         const bool begun = rig.entity->begin_pageout(&transfer);
         if (begun) {
           rig.out = transfer;
         }
         return begun;
       },
       {false, true, false, false, false, false},
       {R, PO, PO, PD, IQ, PI}},
      {"commit_pageout",
       [](EntityRig& rig) {
         if (rig.out == nullptr) {
           rig.out = std::make_shared<PageoutTransfer>(); // of nobody
         }
         rig.wait(rig.out->fence);
         const bool committed = rig.commit_out() == CommitResult::kCommitted;
         rig.out = nullptr;
         return committed;
       },
       {false, false, true, false, false, false},
       {R, OQ, PD, PD, IQ, PI}},
      {"pageout_internal_sync",
       [](EntityRig& rig) { return rig.entity->pageout_internal_sync(); },
       {true, true, false, false, false, false},
       {PD, PD, PO, PD, IQ, PI}},
  });
}

TEST(abandoning_a_pageout_leaves_every_other_state_alone) {
  check_moves({
      {"abandon_pageout",
       [](EntityRig& rig) {
         rig.entity->abandon_pageout(
             rig.out != nullptr ? rig.out : std::make_shared<PageoutTransfer>());
         return rig.storage->watched.load();
       },
       {false, true, false, true, true, true},
       {R, OQ, R, PD, IQ, PI}},
  });
}

TEST(each_step_of_a_pagein_is_taken_from_its_state_alone) {
  check_moves({
      {"request_pagein",
       [](EntityRig& rig) { return rig.entity->request_pagein(); },
       {false, false, false, true, false, false},
       {R, OQ, PO, IQ, IQ, PI}},
      {"cancel_pagein",
       [](EntityRig& rig) { return rig.entity->cancel_pagein(); },
       {false, false, false, false, true, false},
       {R, OQ, PO, PD, PD, PI}},
      {"begin_pagein",
       [](EntityRig& rig) { return (rig.in = rig.entity->begin_pagein()) != nullptr; },
       {false, false, false, false, true, false},
       {R, OQ, PO, PD, PI, PI}},
      {"commit_pagein",
       [](EntityRig& rig) {
         return rig.entity->commit_pagein(
             rig.in != nullptr ? rig.in : std::make_shared<PageinTransfer>());
       },
       {false, false, false, false, false, true},
       {R, OQ, PO, PD, IQ, R}},
      {"cancel_arrival",
       [](EntityRig& rig) {
         return rig.entity->cancel_arrival(
                    rig.in != nullptr ? rig.in : std::make_shared<PageinTransfer>()) != nullptr;
       },
       {false, false, false, false, false, true},
       {R, OQ, PO, PD, IQ, PD}},
      {"pagein_internal_sync",
       [](EntityRig& rig) { return rig.entity->pagein_internal_sync(); },
       {false, false, false, true, true, true},
       {R, R, R, R, R, R}},
  });
}

TEST(an_access_makes_every_state_resident_and_says_what_it_took) {
  const AccessResult expected[] = {
      AccessResult::kResident,
      AccessResult::kCancelledPageout,
      AccessResult::kCancelledPageout,
      AccessResult::kPagedIn,
      AccessResult::kPagedIn,
      AccessResult::kPrefetched,
  };
  for (Copies copies : kBothWays) {
    for (size_t i = 0; i < 6; ++i) {
      EntityRig rig(copies);
      rig.go_to(kAllStates[i]);
      CHECK(accesses_with(rig, expected[i]));
      CHECK_EQ(rig.entity->state(), R);
      CHECK(rig.storage->holds(rig.seed));
      CHECK(!rig.storage->watched);
      CHECK(accesses_with(rig, AccessResult::kResident));
    }
  }
}

TEST(a_touch_is_an_access_that_leaves_a_paged_out_entity_where_it_is) {
  check_moves({
      {"touch",
       [](EntityRig& rig) {
         AccessResult result;
         return rig.entity->touch(&result);
       },
       {true, true, true, false, false, true},
       {R, R, R, PD, IQ, R}},
  });
  EntityRig rig(Copies::kOnCaller);
  rig.go_to(PO);
  AccessResult result = AccessResult::kResident;
  CHECK(rig.entity->touch(&result));
  CHECK_EQ(result, AccessResult::kCancelledPageout);
}

TEST(states_have_names) {
  CHECK_EQ(std::string(to_string(R)), "resident");
  CHECK_EQ(std::string(to_string(OQ)), "out_queued");
  CHECK_EQ(std::string(to_string(PO)), "paging_out");
  CHECK_EQ(std::string(to_string(PD)), "paged_out");
  CHECK_EQ(std::string(to_string(IQ)), "in_queued");
  CHECK_EQ(std::string(to_string(PI)), "paging_in");
}

// --- what a move does ------------------------------------------------------------------

TEST(bytes_come_back_after_every_round_trip) {
  for (Copies copies : kBothWays) {
    for (size_t nbytes : {size_t{0}, size_t{1}, size_t{4096}, size_t{100003}}) {
      EntityRig rig(copies, 0, nbytes);
      for (uint64_t round = 1; round < 5; ++round) {
        rig.write(round);
        CHECK(rig.entity->pageout_internal_sync());
        CHECK_EQ(rig.device->blocks.load(), 0);
        CHECK_EQ(rig.backend->hosts(), 1);
        CHECK(rig.entity->pagein_internal_sync());
        rig.backend->run_all();
        CHECK_EQ(rig.device->blocks.load(), 1);
        CHECK_EQ(rig.backend->hosts(), 0);
        CHECK(rig.storage->holds(round));
      }
    }
  }
}

TEST(a_paged_out_storage_reads_and_writes_its_host_copy) {
  for (Copies copies : kBothWays) {
    EntityRig rig(copies);
    rig.go_to(PD);
    CHECK(rig.storage->block == nullptr);
    CHECK(rig.storage->holds(rig.seed));
    rig.write(11);
    rig.check_intact();
    CHECK_EQ(rig.storage->data, rig.storage->block.get());
  }
}

TEST(the_device_address_is_known_while_resident_alone) {
  for (State state : kAllStates) {
    EntityRig rig(Copies::kOnStreams);
    rig.go_to(state);
    const void* expected = state == R ? rig.storage->data : nullptr;
    CHECK_EQ(rig.entity->device_address(), expected);
    CHECK_EQ(rig.storage->block == nullptr, state >= PD);
  }
}

TEST(a_pageout_copies_behind_the_work_that_was_submitted_before_its_request) {
  EntityRig rig(Copies::kOnStreams);
  rig.go_to(PO);
  CHECK(rig.out->after != nullptr);
  CHECK(!rig.out->after->done());
  rig.out->fence->wait();
  CHECK(rig.out->after->done());
}

TEST(a_pagein_copies_behind_the_work_that_was_submitted_before_it) {
  EntityRig rig(Copies::kOnStreams);
  rig.go_to(PD);
  const auto work = rig.backend->submitted_work();
  REQUIRE(rig.entity->request_pagein());
  rig.in = rig.entity->begin_pagein();
  CHECK(!work->done());
  rig.in->fence->wait();
  CHECK(work->done());
}

TEST(a_pagein_waits_for_other_streams_only_where_they_may_use_the_host_copy) {
  for (const bool served : {false, true}) {
    EntityRig rig(Copies::kOnStreams);
    rig.device->blocks_are_free = true;
    rig.go_to(PD);
    if (served) {
      REQUIRE(rig.entity->serve());
      rig.entity->end_service();
    }
    const auto work = rig.backend->submitted_work();
    REQUIRE(rig.entity->request_pagein());
    rig.in = rig.entity->begin_pagein();
    rig.in->fence->wait();
    CHECK_EQ(work->done(), served);
  }
}

TEST(the_end_of_a_transfer_whose_block_is_the_storages_waits_for_no_copy) {
  EntityRig rig(Copies::kOnStreams);
  rig.go_to(PI);
  CHECK(rig.entity->commit_pagein(rig.in));
  rig.in = nullptr;
  CHECK(rig.entity->arrival() != nullptr);
}

TEST(the_host_copy_of_a_committed_pagein_lasts_until_its_copy_is_over) {
  EntityRig rig(Copies::kOnStreams);
  rig.go_to(PI);
  CHECK(rig.entity->commit_pagein(rig.in));
  CHECK_EQ(rig.entity->state(), R);
  CHECK(!rig.in->fence->done());
  CHECK_EQ(rig.backend->hosts(), 1);
  CHECK(accesses_with(rig, AccessResult::kResident)); // waits for the arrival in order
  CHECK(rig.storage->holds(rig.seed));
  CHECK_EQ(rig.backend->hosts(), 0);
}

TEST(a_prefetched_entity_that_nobody_has_used_goes_out_with_its_bytes) {
  for (Copies copies : kBothWays) {
    EntityRig rig(copies);
    rig.go_to(PI);
    REQUIRE(rig.entity->commit_pagein(rig.in));
    rig.in = nullptr;
    CHECK(rig.entity->pageout_internal_sync());
    CHECK(rig.storage->holds(rig.seed));
  }
}

TEST(a_pagein_is_committed_once) {
  for (Copies copies : kBothWays) {
    EntityRig rig(copies);
    rig.go_to(PI);
    CHECK(accesses_with(rig, AccessResult::kPrefetched));
    CHECK(!rig.entity->commit_pagein(rig.in));
    CHECK(rig.entity->cancel_arrival(rig.in) == nullptr);
    CHECK_EQ(rig.entity->state(), R);
  }
}

TEST(a_cancelled_arrival_gives_its_block_back_and_keeps_the_host_copy) {
  for (Copies copies : kBothWays) {
    EntityRig rig(copies);
    rig.go_to(PI);
    auto block = rig.entity->cancel_arrival(rig.in);
    REQUIRE(block != nullptr);
    CHECK(rig.in->fence == nullptr || rig.in->fence->done()); // the caller may reuse the block
    CHECK_EQ(rig.device->blocks.load(), 1);
    block = nullptr;
    CHECK_EQ(rig.device->blocks.load(), 0);
    CHECK(rig.storage->holds(rig.seed));
    CHECK(!rig.entity->commit_pagein(rig.in));
    CHECK(rig.entity->request_pagein());
  }
}

TEST(raw_access_is_watched_from_the_request_until_the_entity_is_resident) {
  for (State state : kAllStates) {
    EntityRig rig(Copies::kOnStreams);
    rig.go_to(state);
    CHECK_EQ(rig.storage->watched.load(), state != R);
    rig.entity->access();
    CHECK(!rig.storage->watched);
  }
}

} // namespace
} // namespace torch_lms
