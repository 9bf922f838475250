#include <entity/CudaEntityTransferQueue.h>

#include <memory>
#include <thread>
#include <vector>

#include <entity/Error.h>

#include "entity_rig.h"
#include "other_op.h"

namespace torch_lms {
namespace {

using State = EntityState;
using Queue = CudaEntityTransferQueue;
constexpr TransferDirection kOut = TransferDirection::kOut;
constexpr TransferDirection kIn = TransferDirection::kIn;
constexpr size_t kNbytes = 4099; // of an EntityRig
constexpr int64_t kLong = int64_t{60} * 1000 * 1000;

using Rigs = std::vector<std::unique_ptr<EntityRig>>;

Rigs make_rigs(size_t count, Copies copies, State state = State::kResident) {
  Rigs rigs;
  for (size_t i = 0; i < count; ++i) {
    rigs.push_back(std::make_unique<EntityRig>(copies));
    rigs.back()->write(i + 1);
    rigs.back()->go_to(state);
  }
  return rigs;
}

/// Commits what is finished, as a thread between two ops does. Returns how many were.
size_t commit_all(Queue& queue) {
  size_t committed = 0;
  for (FinishedTransfer& finished : queue.take_finished()) {
    std::unique_ptr<DeviceBlock> garbage;
    if (finished.out != nullptr) {
      const auto result = finished.entity->commit_pageout(finished.out, &garbage);
      committed += result == CommitResult::kCommitted ? 1 : 0;
    } else if (finished.in != nullptr) {
      committed += finished.entity->commit_pagein(finished.in) ? 1 : 0;
    }
    queue.retire(finished.entity->nbytes());
  }
  return committed;
}

void request_and_enqueue(Queue& queue, EntityRig& rig) {
  REQUIRE(rig.entity->request_pageout());
  queue.enqueue(rig.entity);
}

/// Until the worker has nothing to do but to wait for ops.
void wait_until_put_off(const Queue& queue) {
  while (!queue.waits_for_ops()) {
    std::this_thread::yield();
  }
}

// --- the order of the queue ------------------------------------------------------------------

TEST(the_queue_is_first_in_first_out_and_passive_transfers_go_to_its_head) {
  const Rigs rigs = make_rigs(4, Copies::kOnCaller);
  Queue queue(kOut);
  queue.enqueue(rigs[0]->entity);
  queue.enqueue(rigs[1]->entity);
  queue.enqueue_passive(rigs[2]->entity);
  queue.enqueue_passive(rigs[3]->entity);
  CHECK_EQ(queue.size(), 4);
  for (size_t expected : {3, 2, 0, 1}) {
    CHECK_EQ(queue.dequeue(), rigs[expected]->entity);
  }
  CHECK(queue.dequeue() == nullptr);
  CHECK_EQ(queue.size(), 0);
  CHECK_EQ(queue.pending_bytes(), 0);
}

TEST(the_worker_takes_transfers_in_the_order_of_the_queue) {
  const Rigs rigs = make_rigs(4, Copies::kOnCaller);
  Queue queue(kOut);
  for (const auto& rig : rigs) {
    REQUIRE(rig->entity->request_pageout());
  }
  queue.enqueue(rigs[0]->entity);
  queue.enqueue(rigs[1]->entity);
  queue.enqueue_passive(rigs[2]->entity);
  queue.enqueue(rigs[3]->entity);
  queue.start_actions();
  queue.wait_actions();
  auto finished = queue.take_finished();
  REQUIRE(finished.size() == 4);
  const size_t expected[] = {2, 0, 1, 3};
  for (size_t i = 0; i < 4; ++i) {
    CHECK_EQ(finished[i].entity, rigs[expected[i]]->entity);
  }
  CHECK(queue.is_committing());
  CHECK(queue.has_uncommitted());
  queue.return_finished(std::move(finished));
  CHECK(!queue.is_committing());
  CHECK(queue.has_uncommitted());
  CHECK_EQ(commit_all(queue), 4);
  CHECK(!queue.has_uncommitted());
}

TEST(a_transfer_that_waits_for_an_op_lets_others_pass) {
  const Rigs rigs = make_rigs(3, Copies::kOnCaller);
  Queue queue(kOut);
  OtherOp op;
  REQUIRE(rigs[0]->entity->request_pageout(OpClock::get().tick()));
  queue.enqueue(rigs[0]->entity);
  request_and_enqueue(queue, *rigs[1]);
  request_and_enqueue(queue, *rigs[2]);
  queue.start_actions();
  const uint64_t all = queue.pending_until();
  wait_until_put_off(queue);
  CHECK_EQ(queue.progress(), 2);
  CHECK(!queue.is_over(all));
  CHECK_EQ(rigs[0]->entity->state(), State::kOutQueued);
  op.end();
  queue.wait_actions();
  CHECK(queue.is_over(all));
  CHECK(!queue.waits_for_ops());
  CHECK_EQ(commit_all(queue), 3);
}

TEST(what_is_added_behind_what_waits_for_an_op_does_not_wait_for_it) {
  const Rigs rigs = make_rigs(40, Copies::kOnCaller);
  Queue queue(kOut);
  OtherOp op;
  REQUIRE(rigs[0]->entity->request_pageout(OpClock::get().tick()));
  queue.enqueue(rigs[0]->entity);
  queue.start_actions();
  for (size_t i = 1; i < rigs.size(); ++i) {
    wait_until_put_off(queue);
    request_and_enqueue(queue, *rigs[i]);
    wait_until_put_off(queue); // not before it has been copied
    CHECK_EQ(queue.progress(), i);
  }
  op.end();
  queue.wait_actions();
  CHECK_EQ(commit_all(queue), rigs.size());
}

TEST(a_transfer_that_is_put_off_can_be_called_off) {
  const Rigs rigs = make_rigs(1, Copies::kOnCaller);
  Queue queue(kOut);
  OtherOp op;
  REQUIRE(rigs[0]->entity->request_pageout(OpClock::get().tick()));
  queue.enqueue(rigs[0]->entity);
  queue.start_actions();
  wait_until_put_off(queue);
  CHECK_EQ(rigs[0]->entity->access(), AccessResult::kCancelledPageout);
  queue.wait_actions();
  CHECK_EQ(commit_all(queue), 0);
  op.end();
}

TEST(at_the_end_what_waits_for_an_op_is_given_up) {
  const Rigs rigs = make_rigs(3, Copies::kOnCaller);
  Queue queue(kOut);
  OtherOp op;
  for (size_t i = 0; i < 2; ++i) {
    REQUIRE(rigs[i]->entity->request_pageout(OpClock::get().tick()));
    queue.enqueue(rigs[i]->entity);
  }
  queue.start_actions();
  wait_until_put_off(queue);
  request_and_enqueue(queue, *rigs[2]);
  queue.give_up_on_ops();
  queue.wait_and_stop_actions();
  CHECK(!queue.waits_for_ops());
  CHECK_EQ(commit_all(queue), 1);
  CHECK_EQ(queue.pending_bytes(), 0);
  for (size_t i = 0; i < 2; ++i) {
    CHECK_EQ(rigs[i]->entity->access(), AccessResult::kCancelledPageout);
    CHECK(rigs[i]->storage->holds(i + 1));
  }
}

TEST(an_erased_transfer_is_not_run) {
  const Rigs rigs = make_rigs(3, Copies::kOnCaller);
  Queue queue(kOut);
  for (const auto& rig : rigs) {
    request_and_enqueue(queue, *rig);
  }
  CHECK(queue.erase(rigs[1]->entity.get()));
  CHECK(!queue.erase(rigs[1]->entity.get()));
  CHECK(!queue.erase(nullptr));
  CHECK_EQ(queue.size(), 2);
  CHECK_EQ(queue.pending_bytes(), 2 * kNbytes);
  queue.start_actions();
  queue.wait_actions();
  CHECK_EQ(rigs[1]->entity->state(), State::kOutQueued);
  CHECK_EQ(commit_all(queue), 2);
}

TEST(a_wait_is_for_what_was_there_before_it_however_much_comes_and_ends_later) {
  const Rigs rigs = make_rigs(6, Copies::kOnCaller);
  Queue queue(kOut);
  OtherOp op;
  REQUIRE(rigs[0]->entity->request_pageout(OpClock::get().tick()));
  queue.enqueue(rigs[0]->entity);
  queue.start_actions();
  const uint64_t first = queue.pending_until();
  for (size_t i = 1; i < rigs.size(); ++i) { // passive ones overtake it
    REQUIRE(rigs[i]->entity->request_pageout());
    queue.enqueue_passive(rigs[i]->entity);
  }
  while (queue.progress() < 5) {
    std::this_thread::yield();
  }
  CHECK(!queue.is_over(first));
  std::atomic<bool> over{false};
  std::thread waiter([&] {
    queue.wait_pending();
    over = true;
  });
  wait_until_put_off(queue);
  CHECK(!over.load());
  op.end();
  waiter.join();
  CHECK(queue.is_over(first));
  CHECK_EQ(commit_all(queue), 6);
}

TEST(a_wait_for_what_is_called_off_ends_though_others_are_pending) {
  const Rigs rigs = make_rigs(2, Copies::kOnCaller);
  Queue queue(kOut);
  OtherOp op;
  REQUIRE(rigs[0]->entity->request_pageout(OpClock::get().tick()));
  REQUIRE(rigs[1]->entity->request_pageout(OpClock::get().tick()));
  queue.start_actions();
  queue.enqueue(rigs[0]->entity);
  const uint64_t first = queue.pending_until();
  queue.enqueue(rigs[1]->entity);
  while (!queue.erase(rigs[0]->entity.get())) { // the worker may have it in its hands
    std::this_thread::yield();
  }
  CHECK(queue.is_over(first));
  op.end();
  queue.wait_actions();
  CHECK_EQ(commit_all(queue), 1);
}

TEST(bytes_are_pending_until_they_are_retired) {
  const Rigs rigs = make_rigs(3, Copies::kOnStreams);
  Queue queue(kOut);
  for (const auto& rig : rigs) {
    request_and_enqueue(queue, *rig);
  }
  CHECK_EQ(queue.pending_bytes(), 3 * kNbytes);
  CHECK(!queue.has_finished());
  queue.start_actions();
  queue.wait_actions();
  CHECK(queue.has_finished());
  CHECK_EQ(queue.pending_bytes(), 3 * kNbytes);
  CHECK_EQ(commit_all(queue), 3);
  CHECK(!queue.has_finished());
  CHECK_EQ(queue.pending_bytes(), 0);
}

TEST(what_is_put_back_comes_before_what_finished_since) {
  const Rigs rigs = make_rigs(2, Copies::kOnCaller);
  Queue queue(kOut);
  queue.start_actions();
  request_and_enqueue(queue, *rigs[0]);
  queue.wait_actions();
  auto first = queue.take_finished();
  request_and_enqueue(queue, *rigs[1]);
  queue.wait_actions();
  queue.return_finished(std::move(first));
  CHECK(queue.has_finished());
  const auto all = queue.take_finished();
  REQUIRE(all.size() == 2);
  CHECK_EQ(all[0].entity, rigs[0]->entity);
  CHECK_EQ(all[1].entity, rigs[1]->entity);
  rigs[0]->out = all[0].out;
  rigs[1]->out = all[1].out;
}

// --- both directions ---------------------------------------------------------------------------

TEST(bytes_survive_both_queues) {
  for (Copies copies : kBothWays) {
    const Rigs rigs = make_rigs(8, copies);
    Queue out(kOut, 3 * kNbytes);
    Queue in(kIn, 2 * kNbytes);
    out.start_actions();
    in.start_actions();
    for (int round = 0; round < 3; ++round) {
      for (const auto& rig : rigs) {
        request_and_enqueue(out, *rig);
      }
      out.wait_actions();
      CHECK_EQ(commit_all(out), 8);
      for (const auto& rig : rigs) {
        CHECK_EQ(rig->entity->state(), State::kPagedOut);
        CHECK(rig->entity->request_pagein());
        in.enqueue(rig->entity);
      }
      in.wait_actions();
      CHECK_EQ(commit_all(in), 8);
      for (const auto& rig : rigs) {
        CHECK_EQ(rig->entity->access(), AccessResult::kResident);
        CHECK(rig->storage->holds(rig->seed));
      }
    }
  }
}

TEST(called_off_transfers_finish_too) {
  const Rigs out_rigs = make_rigs(1, Copies::kOnCaller);
  const Rigs in_rigs = make_rigs(1, Copies::kOnCaller, State::kInQueued);
  Queue out(kOut);
  Queue in(kIn);
  request_and_enqueue(out, *out_rigs[0]);
  in.enqueue(in_rigs[0]->entity);
  out_rigs[0]->entity->access();
  CHECK(in_rigs[0]->entity->cancel_pagein());
  out.start_actions();
  in.start_actions();
  out.wait_actions();
  in.wait_actions();
  CHECK_EQ(out.progress(), 1);
  CHECK_EQ(in.progress(), 1);
  CHECK_EQ(commit_all(out), 0);
  CHECK_EQ(commit_all(in), 0);
  CHECK_EQ(out.pending_bytes() + in.pending_bytes(), 0);
}

TEST(no_more_bytes_are_under_way_than_the_limit_and_one_transfer) {
  auto rigs = make_rigs(4, Copies::kOnStreams);
  Queue queue(kOut, 2 * kNbytes);
  for (const auto& rig : rigs) {
    rig->backend->set_held(true);
    request_and_enqueue(queue, *rig);
  }
  Gate second;
  rigs[1]->backend->interruptions.at(BackendStep::kCopyToHost, second.action());
  queue.start_actions();
  second.wait_until_reached();
  CHECK_EQ(queue.size(), 2);
  second.open();
  rigs[0]->backend->set_held(false); // one is over: the worker takes the third
  queue.wait_for_progress(0, kLong);
  for (const auto& rig : rigs) {
    CHECK_EQ(rig->backend->interruptions.count(BackendStep::kCopyToHost) <= 1, true);
  }
  CHECK(queue.size() >= 1); // two are under way still
  for (const auto& rig : rigs) {
    rig->backend->set_held(false);
  }
  queue.wait_actions();
  CHECK_EQ(commit_all(queue), 4);
}

// --- waiting
// ---------------------------------------------------------------------------------------

TEST(waiting_for_transfers_without_a_worker_is_an_error) {
  const Rigs rigs = make_rigs(1, Copies::kOnCaller);
  Queue queue(kOut);
  queue.wait_actions(); // for nothing
  request_and_enqueue(queue, *rigs[0]);
  CHECK_THROWS(queue.wait_actions(), Error, "start_actions");
  CHECK_THROWS(queue.wait_and_stop_actions(), Error, "start_actions");
  queue.open();
  queue.start_actions();
  queue.wait_actions();
  CHECK_EQ(commit_all(queue), 1);
}

TEST(a_queue_that_is_waited_for_takes_nothing_and_then_takes_again) {
  const Rigs rigs = make_rigs(2, Copies::kOnCaller);
  Queue queue(kOut);
  Gate gate;
  rigs[0]->backend->interruptions.at(BackendStep::kCopyToHost, gate.action());
  request_and_enqueue(queue, *rigs[0]);
  queue.start_actions();
  gate.wait_until_reached();
  std::thread waiter([&] { queue.wait_actions(); });
  bool locked = false;
  REQUIRE(rigs[1]->entity->request_pageout());
  while (!locked) { // until the waiter has come
    try {
      queue.enqueue(rigs[1]->entity);
      CHECK(queue.erase(rigs[1]->entity.get()));
      std::this_thread::yield();
    } catch (const Error&) {
      locked = true;
    }
  }
  CHECK_THROWS(queue.enqueue_passive(rigs[1]->entity), Error, "open transfer queue");
  CHECK_EQ(queue.pending_bytes(), kNbytes);
  gate.open();
  waiter.join();
  queue.enqueue(rigs[1]->entity);
  queue.wait_actions();
  CHECK_EQ(commit_all(queue), 2);
}

TEST(a_stopped_queue_is_locked_until_it_is_opened_or_started) {
  const Rigs rigs = make_rigs(1, Copies::kOnCaller);
  Queue queue(kOut);
  queue.start_actions();
  queue.start_actions(); // no effect
  queue.wait_and_stop_actions();
  CHECK_THROWS(queue.enqueue(rigs[0]->entity), Error, "open transfer queue");
  queue.wait_and_stop_actions(); // nothing to do
  queue.open();
  request_and_enqueue(queue, *rigs[0]);
  CHECK_EQ(queue.size(), 1);
  queue.start_actions();
  queue.wait_and_stop_actions();
  CHECK_EQ(commit_all(queue), 1);
  queue.start_actions();
  CHECK(rigs[0]->entity->pagein_internal_sync());
  request_and_enqueue(queue, *rigs[0]);
  queue.wait_actions();
  CHECK_EQ(commit_all(queue), 1);
}

TEST(progress_counts_finished_transfers_and_wakes_who_waits) {
  const Rigs rigs = make_rigs(3, Copies::kOnCaller);
  Queue queue(kOut);
  CHECK_EQ(queue.wait_for_progress(0, kLong), 0); // idle
  queue.start_actions();
  for (uint64_t i = 0; i < 3; ++i) {
    request_and_enqueue(queue, *rigs[i]);
    CHECK_EQ(queue.wait_for_progress(i, kLong), i + 1);
  }
  CHECK_EQ(queue.progress(), 3);
  queue.wait_actions();
  CHECK_EQ(commit_all(queue), 3);
}

TEST(waiting_for_progress_ends_with_its_time) {
  const Rigs rigs = make_rigs(1, Copies::kOnCaller);
  Queue queue(kOut); // without a worker
  request_and_enqueue(queue, *rigs[0]);
  CHECK_EQ(queue.wait_for_progress(0, 1), 0);
  CHECK_EQ(queue.dequeue(), rigs[0]->entity);
}

TEST(taking_the_last_transfer_wakes_who_waits_for_the_queue) {
  for (bool by_erase : {false, true}) {
    const Rigs rigs = make_rigs(2, Copies::kOnCaller);
    Queue queue(kOut, 1);
    Gate gate;
    rigs[0]->backend->interruptions.at(BackendStep::kCopyToHost, gate.action());
    request_and_enqueue(queue, *rigs[0]);
    queue.start_actions();
    gate.wait_until_reached();
    request_and_enqueue(queue, *rigs[1]);
    std::thread waiter([&] { queue.wait_actions(); });
    CHECK(by_erase ? queue.erase(rigs[1]->entity.get()) : queue.dequeue() == rigs[1]->entity);
    gate.open();
    waiter.join();
    CHECK_EQ(commit_all(queue), 1);
  }
}

} // namespace
} // namespace torch_lms
