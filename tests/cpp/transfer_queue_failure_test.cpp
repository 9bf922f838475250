// The queue's worker when transfers fail, storages die and the queue ends under it.

#include <entity/CudaEntityTransferQueue.h>

#include <chrono>
#include <functional>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <entity/Error.h>

#include "entity_rig.h"

namespace torch_lms {
namespace {

using State = EntityState;
using Queue = CudaEntityTransferQueue;
constexpr TransferDirection kOut = TransferDirection::kOut;
constexpr TransferDirection kIn = TransferDirection::kIn;

/// Starts the transfer of an entity that is in its queued state, and takes what finished.
void enqueue_started(Queue& queue, EntityRig& rig) {
  queue.enqueue(rig.entity);
  queue.start_actions();
}

/// The worker is in its copy until the gate opens.
void stop_in_copy(Queue& queue, EntityRig& rig, Gate& gate) {
  rig.backend->interruptions.at(BackendStep::kCopyToHost, gate.action());
  rig.go_to(State::kOutQueued);
  enqueue_started(queue, rig);
  gate.wait_until_reached();
}

/// Takes the one transfer that has finished, for the rig to drop or commit.
void take_one(Queue& queue, EntityRig& rig) {
  auto finished = queue.take_finished();
  REQUIRE(finished.size() == 1);
  CHECK_EQ(finished[0].entity, rig.entity);
  rig.out = finished[0].out;
  rig.in = finished[0].in;
  queue.retire(rig.entity->nbytes());
}

// --- errors -------------------------------------------------------------------------------------

TEST(whatever_is_thrown_on_the_worker_is_rethrown_to_the_next_waiter_once) {
  const std::function<void()> thrown[] = {
      throwing<HostPoolFull>("full"),
      throwing<std::logic_error>("not of ours"),
      [] { throw std::bad_alloc(); },
      [] { throw 7; },
  };
  for (const auto& action : thrown) {
    EntityRig rig(Copies::kOnCaller);
    Queue queue(kOut);
    rig.backend->interruptions.at(BackendStep::kCopyToHost, action);
    rig.go_to(State::kOutQueued);
    enqueue_started(queue, rig);
    bool threw = false;
    try {
      queue.wait_actions();
    } catch (...) {
      threw = true;
    }
    CHECK(threw);
    queue.wait_actions(); // does not throw again
    CHECK(queue.take_error() == nullptr);
    take_one(queue, rig);
    rig.check_intact();
    rig.drop_transfers();
    REQUIRE(rig.entity->request_pageout());
    queue.enqueue(rig.entity); // the worker lives, and the queue is open
    queue.wait_and_stop_actions();
    take_one(queue, rig);
    CHECK_EQ(rig.commit_out(), CommitResult::kCommitted);
    rig.out = nullptr;
  }
}

TEST(an_error_that_is_taken_is_not_rethrown) {
  EntityRig rig(Copies::kOnCaller);
  Queue queue(kOut);
  rig.backend->set_most_hosts(0);
  rig.go_to(State::kOutQueued);
  enqueue_started(queue, rig);
  CHECK_EQ(queue.wait_for_progress(0, int64_t{60} * 1000 * 1000), 1);
  const auto error = queue.take_error();
  REQUIRE(error != nullptr);
  CHECK_THROWS(std::rethrow_exception(error), HostPoolFull, "full");
  queue.wait_actions();
  CHECK(queue.take_error() == nullptr);
  take_one(queue, rig);
}

TEST(stopping_rethrows_and_has_stopped) {
  EntityRig rig(Copies::kOnCaller);
  Queue queue(kOut);
  rig.backend->set_most_hosts(0);
  rig.go_to(State::kOutQueued);
  enqueue_started(queue, rig);
  CHECK_THROWS(queue.wait_and_stop_actions(), HostPoolFull, "full");
  CHECK_THROWS(queue.enqueue(rig.entity), Error, "open transfer queue");
  queue.wait_and_stop_actions();
  take_one(queue, rig);
}

TEST(a_pageout_that_fails_on_its_stream_is_abandoned_by_the_worker) {
  EntityRig rig(Copies::kOnStreams);
  Queue queue(kOut);
  rig.backend->fail_next_copy();
  rig.go_to(State::kOutQueued);
  enqueue_started(queue, rig);
  CHECK_THROWS(queue.wait_actions(), TransferFailed, "stream");
  CHECK_EQ(rig.entity->state(), State::kResident);
  CHECK_EQ(rig.backend->hosts(), 0);
  take_one(queue, rig);
}

TEST(a_prefetch_without_room_leaves_the_entity_paged_out) {
  for (Copies copies : kBothWays) {
    EntityRig rig(copies);
    Queue queue(kIn);
    rig.go_to(State::kInQueued);
    rig.device->most_blocks = 0;
    enqueue_started(queue, rig);
    CHECK_THROWS(queue.wait_actions(), NoRoom, "full");
    CHECK_EQ(rig.entity->state(), State::kPagedOut);
    CHECK(rig.storage->holds(rig.seed));
    take_one(queue, rig);
    CHECK(rig.in == nullptr);
    rig.device->most_blocks = 1;
  }
}

TEST(one_failure_does_not_stop_the_transfers_behind_it) {
  EntityRig failing(Copies::kOnCaller);
  EntityRig fine(Copies::kOnCaller);
  Queue queue(kOut);
  failing.backend->set_most_hosts(0);
  failing.go_to(State::kOutQueued);
  fine.go_to(State::kOutQueued);
  queue.enqueue(failing.entity);
  queue.enqueue(fine.entity);
  queue.start_actions();
  CHECK_THROWS(queue.wait_actions(), HostPoolFull, "full");
  const auto finished = queue.take_finished();
  REQUIRE(finished.size() == 2);
  failing.out = finished[0].out;
  fine.out = finished[1].out;
  CHECK_EQ(fine.commit_out(), CommitResult::kCommitted);
  fine.out = nullptr;
}

// --- storages and entities that go ------------------------------------------------------------

TEST(an_entity_whose_storage_dies_in_the_queue_is_passed_over) {
  for (Copies copies : kBothWays) {
    EntityRig out(copies);
    EntityRig in(copies);
    Queue out_queue(kOut);
    Queue in_queue(kIn);
    out.go_to(State::kOutQueued);
    in.go_to(State::kInQueued);
    out.storage = nullptr; // kept by the request
    in.storage = nullptr;
    enqueue_started(out_queue, out);
    enqueue_started(in_queue, in);
    out_queue.wait_actions();
    in_queue.wait_actions();
    take_one(out_queue, out);
    take_one(in_queue, in);
    CHECK(in.in == nullptr);
    CHECK_EQ(out.backend->interruptions.count(BackendStep::kAllocateHost), 0);
    CHECK(out.entity->gone());
    CHECK(in.entity->gone());
    CHECK_EQ(in.device->blocks.load(), 0);
  }
}

TEST(the_worker_leaves_the_end_of_a_storage_to_who_takes_the_transfer) {
  EntityRig rig(Copies::kOnCaller);
  Queue queue(kOut);
  Gate gate;
  stop_in_copy(queue, rig, gate);
  rig.storage = nullptr; // the transfer keeps it
  gate.open();
  queue.wait_actions();
  CHECK_EQ(rig.device->blocks.load(), 1);
  take_one(queue, rig);
  rig.drop_transfers();
  CHECK_EQ(rig.device->blocks.load(), 0);
}

TEST(a_queued_entity_lives_as_long_as_the_queue_holds_it) {
  EntityRig rig(Copies::kOnCaller);
  rig.go_to(State::kPagedOut);
  std::weak_ptr<EntityStorageImpl> weak;
  {
    EntityRig other(Copies::kOnCaller);
    weak = other.entity;
  }
  CHECK(weak.expired());
  weak = rig.entity;
  {
    Queue queue(kIn);
    REQUIRE(rig.entity->request_pagein());
    queue.enqueue(rig.entity);
    CHECK_EQ(weak.use_count(), 3); // the rig, the mark of the storage, the queue
    CHECK(queue.erase(rig.entity.get()));
    CHECK_EQ(weak.use_count(), 2);
    queue.enqueue(rig.entity);
  }
  CHECK_EQ(weak.use_count(), 2);
}

// --- the end of a queue ------------------------------------------------------------------------

TEST(a_queue_that_ends_waits_for_what_is_under_way_and_forgets_the_rest) {
  for (Copies copies : kBothWays) {
    EntityRig under_way(copies);
    EntityRig queued(copies);
    Gate gate;
    std::thread opener;
    {
      Queue queue(kIn, 1);
      under_way.go_to(State::kInQueued);
      queued.go_to(State::kInQueued);
      under_way.backend->interruptions.at(BackendStep::kCopyToDevice, gate.action());
      queue.enqueue(under_way.entity);
      queue.enqueue(queued.entity);
      queue.start_actions();
      gate.wait_until_reached();
      opener = std::thread([&] {
        while (queued.entity.use_count() > 2) { // until the queue has let go of it
          std::this_thread::yield();
        }
        gate.open();
      });
    }
    opener.join();
    CHECK_EQ(under_way.entity->state(), State::kPagedOut);
    CHECK_EQ(queued.entity->state(), State::kInQueued);
    CHECK_EQ(queued.backend->interruptions.count(BackendStep::kCopyToDevice), 0);
    under_way.check_intact();
    queued.check_intact();
  }
}

TEST(a_queue_that_was_never_started_ends) {
  EntityRig rig(Copies::kOnCaller);
  rig.go_to(State::kOutQueued);
  Queue queue(kOut);
  queue.enqueue(rig.entity);
}

TEST(the_start_of_each_worker_is_announced_on_it) {
  std::vector<std::thread::id> workers;
  Queue queue(kOut, 1, [&] { workers.push_back(std::this_thread::get_id()); });
  queue.start_actions();
  queue.wait_and_stop_actions();
  queue.start_actions();
  queue.wait_and_stop_actions();
  CHECK_EQ(workers.size(), 2);
  for (const auto& worker : workers) {
    CHECK(worker != std::this_thread::get_id());
  }
}

TEST(a_pagein_that_fails_on_its_stream_keeps_the_host_copy) {
  EntityRig rig(Copies::kOnStreams);
  Queue queue(kIn);
  rig.go_to(State::kInQueued);
  rig.backend->fail_next_copy();
  enqueue_started(queue, rig);
  CHECK_THROWS(queue.wait_actions(), TransferFailed, "stream");
  take_one(queue, rig);
  CHECK(rig.in == nullptr || !rig.entity->commit_pagein(rig.in));
  rig.in = nullptr;
  CHECK_EQ(rig.entity->state(), State::kPagedOut);
  CHECK(rig.storage->holds(rig.seed));
}

TEST(two_threads_that_wait_leave_the_queue_open) {
  for (int round = 0; round < 50; ++round) {
    EntityRig rig(Copies::kOnCaller);
    Queue queue(kOut);
    Gate gate;
    stop_in_copy(queue, rig, gate);
    std::thread first([&] { queue.wait_actions(); });
    std::thread second([&] { queue.wait_actions(); });
    gate.open();
    first.join();
    second.join();
    take_one(queue, rig);
    queue.enqueue(rig.entity); // which throws if it is locked
    queue.wait_actions();
  }
}

TEST(two_threads_may_stop_the_queue_at_once) {
  for (int round = 0; round < 200; ++round) {
    Queue queue(kOut);
    queue.start_actions();
    std::thread other([&] { queue.wait_and_stop_actions(); });
    queue.wait_and_stop_actions();
    other.join();
  }
}

/// A queue whose first worker stops at a gate on its way out, and a thread that stops it.
class QueueBeingStopped {
 public:
  QueueBeingStopped() : queue(kOut, 1, [this] { stop_at_end(); }) {
    queue.start_actions();
    stopper_ = std::thread([this] { queue.wait_and_stop_actions(); });
    gate_.wait_until_reached();
  }
  void end() {
    gate_.open();
    stopper_.join();
  }

  Queue queue;

 private:
  struct AtEnd {
    Gate* gate;
    ~AtEnd() {
      gate->pass();
    }
  };
  void stop_at_end() {
    if (!started_) {
      started_ = true;
      thread_local AtEnd at_end{&gate_};
      static_cast<void>(at_end);
    }
  }

  Gate gate_;
  bool started_ = false;
  std::thread stopper_;
};

constexpr auto kMoment = std::chrono::milliseconds(20); // for another thread to come to its wait

TEST(a_queue_that_is_started_while_it_stops_has_a_worker) {
  EntityRig rig(Copies::kOnCaller);
  QueueBeingStopped stopped;
  rig.go_to(State::kOutQueued);
  std::thread starter([&] {
    stopped.queue.start_actions();
    stopped.queue.enqueue(rig.entity);
  });
  std::this_thread::sleep_for(kMoment);
  stopped.end();
  starter.join();
  stopped.queue.wait_actions();
  take_one(stopped.queue, rig);
}

TEST(who_waits_for_a_stop_does_not_wait_for_the_next_one) {
  for (int round = 0; round < 20; ++round) {
    QueueBeingStopped stopped;
    std::thread second([&] { stopped.queue.wait_and_stop_actions(); });
    std::thread starter([&] { stopped.queue.start_actions(); });
    std::this_thread::sleep_for(kMoment / 10);
    stopped.end();
    second.join();
    starter.join();
  }
}

TEST(a_queue_that_is_started_before_it_stops_stays_locked) {
  EntityRig rig(Copies::kOnCaller);
  Queue queue(kOut);
  Gate gate;
  stop_in_copy(queue, rig, gate);
  std::thread stopper([&] { queue.wait_and_stop_actions(); });
  std::this_thread::sleep_for(kMoment);
  queue.start_actions(); // it runs
  gate.open();
  stopper.join();
  CHECK_THROWS(queue.enqueue(rig.entity), Error, "open transfer queue");
  take_one(queue, rig);
}

TEST(what_the_start_of_a_worker_throws_is_rethrown) {
  Queue queue(kOut, 1, throwing<Error>("no thread state"));
  queue.start_actions();
  CHECK_THROWS(queue.wait_actions(), Error, "no thread state");
}

TEST(a_queue_without_room_for_a_byte_runs_one_transfer_at_a_time) {
  EntityRig rig(Copies::kOnCaller);
  Queue queue(kOut, 0);
  rig.go_to(State::kOutQueued);
  enqueue_started(queue, rig);
  queue.wait_actions();
  take_one(queue, rig);
}

TEST(a_queue_that_ends_gives_the_memory_of_finished_pageouts_back) {
  EntityRig rig(Copies::kOnCaller);
  {
    Queue queue(kOut);
    rig.go_to(State::kOutQueued);
    enqueue_started(queue, rig);
    queue.wait_actions();
  }
  rig.entity->access();
  CHECK_EQ(rig.backend->hosts(), 0);
}

} // namespace
} // namespace torch_lms
