// Random walks through the states of an entity, in step with a model: the state, the
// bytes and what each call returns must be the model's, whatever fails on the way.

#include <entity/EntityStorageImpl.h>

#include <array>
#include <memory>
#include <random>
#include <vector>

#include <entity/Error.h>

#include "entity_rig.h"

namespace torch_lms {
namespace {

using State = EntityState;
constexpr size_t kNbytes = 257;

/// One entity, and what is expected of it.
class Walk {
 public:
  Walk(Copies copies, std::mt19937& random) : copies_(copies), random_(random) {
    begin_life();
  }
  ~Walk() {
    end_life();
  }
  Walk(const Walk&) = delete;
  Walk& operator=(const Walk&) = delete;

  void step() {
    using Step = void (Walk::*)();
    // The steps of a round trip, by state; half of all, or few would come about.
    static constexpr Step kOnwards[] = {
        &Walk::request_out,
        &Walk::begin_out,
        &Walk::commit_out,
        &Walk::request_in,
        &Walk::begin_in,
        &Walk::commit_in,
    };
    static constexpr Step kAny[] = {
        &Walk::request_out,   &Walk::begin_out,      &Walk::commit_out,   &Walk::request_in,
        &Walk::begin_in,      &Walk::commit_in,      &Walk::cancel_in,    &Walk::cancel_arrival,
        &Walk::use,           &Walk::touch,          &Walk::pin,          &Walk::unpin,
        &Walk::end_service,   &Walk::drop_unwritten, &Walk::release_copy, &Walk::stop_watching,
        &Walk::change_limits, &Walk::run_a_stream,   &Walk::die,
    };
    const Step step = below(2) == 0 ? kOnwards[static_cast<size_t>(state_)]
                                    : kAny[below(sizeof(kAny) / sizeof(kAny[0]))];
    (this->*step)();
    check();
  }

  int committed = 0; ///< Moves that were made in full.
  int failed = 0;
  int served = 0; ///< Uses in place beside another.
  int dropped = 0; ///< Page-outs without a copy.

 private:
  unsigned below(size_t count) {
    return static_cast<unsigned>(random_() % count);
  }
  EntityStorageImpl& entity() {
    return *rig_->entity;
  }

  void begin_life() {
    rig_ = std::make_unique<EntityRig>(copies_, 0, kNbytes);
    rig_->device->keeps_copies = below(2) == 0;
    rig_->write(random_());
    state_ = State::kResident;
    pins_ = 0;
    services_ = 0;
    ordered_ = true;
    kept_ = false;
  }

  /// The rig checks what is left.
  void end_life() {
    rig_->device->most_blocks = SIZE_MAX;
    while (services_ != 0) {
      end_service();
    }
    rig_ = nullptr;
  }

  void check() {
    REQUIRE(entity().state() == state_);
    CHECK_EQ(entity().pinned(), pins_ != 0);
    CHECK_EQ(rig_->storage->block == nullptr, state_ >= State::kPagedOut);
    CHECK_EQ(entity().keeps_copy(), kept_);
    const bool settled = entity().pin_settled();
    CHECK(!settled || (state_ == State::kResident && !entity().arrival()));
    entity().unpin();
    if (ordered_) { // else the bytes are still on their way
      REQUIRE(rig_->storage->holds(rig_->seed));
    }
  }

  // --- page-out ---

  void request_out() {
    if (kept_ && below(2) == 0) {
      drop_unwritten();
      return;
    }
    const bool expected = state_ == State::kResident && pins_ == 0;
    CHECK_EQ(entity().request_pageout(), expected);
    kept_ = false;
    if (expected) {
      drop_called_off();
      state_ = State::kOutQueued;
      ordered_ = true;
    }
  }

  /// A queue would have finished the transfer that an access called off.
  void drop_called_off() {
    if (rig_->out != nullptr) {
      rig_->wait_for_end(rig_->out->fence);
      CHECK_EQ(rig_->commit_out(), CommitResult::kDropped);
      rig_->out = nullptr;
    }
  }

  void begin_out() {
    if (state_ != State::kOutQueued) {
      std::shared_ptr<PageoutTransfer> none;
      CHECK(!entity().begin_pageout(&none));
      return;
    }
    interrupt(BackendStep::kCopyToHost);
    try {
      CHECK(entity().begin_pageout(&rig_->out));
      state_ = State::kPagingOut;
    } catch (const Error&) {
      ++failed;
      state_ = State::kResident;
    }
    rig_->backend->interruptions.at(BackendStep::kCopyToHost, [] {});
  }

  void commit_out() {
    if (state_ != State::kPagingOut) {
      return;
    }
    rig_->wait(rig_->out->fence);
    const auto expected = pins_ != 0 ? CommitResult::kInUse : CommitResult::kCommitted;
    CHECK_EQ(rig_->commit_out(), expected);
    if (expected == CommitResult::kCommitted) {
      rig_->out = nullptr;
      state_ = State::kPagedOut;
      ++committed;
    }
  }

  // --- page-in ---

  void request_in() {
    const bool expected = state_ == State::kPagedOut && services_ == 0;
    CHECK_EQ(entity().request_pagein(), expected);
    state_ = expected ? State::kInQueued : state_;
  }

  void cancel_in() {
    const bool expected = state_ == State::kInQueued;
    CHECK_EQ(entity().cancel_pagein(), expected);
    state_ = expected ? State::kPagedOut : state_;
  }

  void begin_in() {
    if (state_ != State::kInQueued) {
      CHECK(entity().begin_pagein() == nullptr);
      return;
    }
    interrupt(BackendStep::kCopyToDevice);
    try {
      rig_->in = entity().begin_pagein();
      CHECK(rig_->in != nullptr);
      state_ = State::kPagingIn;
    } catch (const Error&) {
      ++failed;
      state_ = State::kPagedOut;
    }
    rig_->backend->interruptions.at(BackendStep::kCopyToDevice, [] {});
  }

  void commit_in() {
    if (rig_->in == nullptr) {
      return;
    }
    const bool expected = state_ == State::kPagingIn;
    CHECK_EQ(entity().commit_pagein(rig_->in), expected);
    if (expected) {
      arrived();
      ordered_ = rig_->in->fence == nullptr || rig_->in->fence->done();
      ++committed;
    }
    rig_->in = nullptr;
  }

  void cancel_arrival() {
    if (rig_->in == nullptr) {
      return;
    }
    const bool expected = state_ == State::kPagingIn;
    CHECK_EQ(entity().cancel_arrival(rig_->in) != nullptr, expected);
    rig_->in = nullptr;
    state_ = expected ? State::kPagedOut : state_;
  }

  // --- use ---

  /// The block has been installed.
  void arrived() {
    state_ = State::kResident;
    kept_ = rig_->device->keeps_copies;
  }

  AccessResult expected_access() const {
    if (services_ != 0 && state_ == State::kPagedOut) {
      return AccessResult::kServed;
    }
    static constexpr AccessResult kExpected[] = {
        AccessResult::kResident,
        AccessResult::kCancelledPageout,
        AccessResult::kCancelledPageout,
        AccessResult::kPagedIn,
        AccessResult::kPagedIn,
        AccessResult::kPrefetched,
    };
    return kExpected[static_cast<size_t>(state_)];
  }

  void use() {
    try {
      const AccessResult expected = expected_access();
      CHECK_EQ(entity().access(), expected);
      if (expected == AccessResult::kServed) {
        ++services_;
        ++served;
      } else {
        used();
      }
    } catch (const NoRoom&) { // the op works on the host copy
      CHECK(state_ == State::kPagedOut || state_ == State::kInQueued);
      CHECK_EQ(services_, 0);
      ++failed;
      state_ = State::kPagedOut;
      CHECK(entity().serve());
      ++services_;
    }
    check();
    if (below(2) == 0) {
      rig_->write(random_());
      entity().release_copy(); // as who watches the block does
      kept_ = false;
    }
  }

  void used() {
    if (state_ >= State::kPagedOut) {
      arrived();
    }
    state_ = State::kResident;
    ordered_ = true;
  }

  void end_service() {
    if (services_ > 0) {
      entity().end_service();
      --services_;
    }
  }

  void touch() {
    AccessResult result;
    const bool expected = state_ != State::kPagedOut && state_ != State::kInQueued;
    const AccessResult expected_result = expected_access();
    CHECK_EQ(entity().touch(&result), expected);
    if (expected) {
      CHECK_EQ(result, expected_result);
      used();
    }
  }

  void pin() {
    if (pins_ < 2 && below(4) == 0) {
      entity().pin();
      ++pins_;
    }
  }
  void unpin() {
    if (pins_ > 0) {
      entity().unpin();
      --pins_;
    }
  }

  // --- bytes that the host still has ---

  void drop_unwritten() {
    const bool expected = kept_ && state_ == State::kResident && pins_ == 0 &&
                          rig_->storage->block_watched && !rig_->storage->written;
    std::unique_ptr<DeviceBlock> garbage;
    CHECK_EQ(entity().drop_unwritten(&garbage), expected);
    CHECK_EQ(garbage != nullptr, expected);
    if (expected) {
      drop_called_off();
      state_ = State::kPagedOut;
      ordered_ = true; // the host's bytes are
      kept_ = false;
      ++dropped;
    }
  }

  void release_copy() {
    if (below(4) == 0) {
      CHECK_EQ(entity().release_copy(), kept_);
      kept_ = false;
    }
  }

  void stop_watching() {
    if (below(4) == 0) {
      entity().stop_watching();
      kept_ = false; // there is one only while it is resident
      CHECK(state_ != State::kResident || !rig_->storage->block_watched);
    }
  }

  // --- the world ---

  void interrupt(BackendStep step) {
    if (below(8) == 0) {
      rig_->backend->interruptions.at(step, throwing<TransferFailed>("midway"));
    }
  }

  void change_limits() {
    rig_->backend->set_most_hosts(below(4) == 0 ? 0 : SIZE_MAX);
    rig_->device->most_blocks = below(4) == 0 ? 0 : SIZE_MAX;
  }

  void run_a_stream() {
    rig_->backend->run_oldest(static_cast<Stream>(below(3)));
  }

  void die() {
    if (below(8) != 0) {
      return;
    }
    end_life();
    begin_life();
  }

  const Copies copies_;
  std::mt19937& random_;
  std::unique_ptr<EntityRig> rig_;
  State state_ = State::kResident;
  int pins_ = 0;
  int services_ = 0;
  bool ordered_ = true;
  bool kept_ = false;
};

void walk(Copies copies) {
  int served = 0;
  int dropped = 0;
  for (unsigned seed = 1; seed <= 4; ++seed) {
    std::mt19937 random(seed);
    std::array<std::unique_ptr<Walk>, 4> walks;
    for (auto& each : walks) {
      each = std::make_unique<Walk>(copies, random);
    }
    for (int i = 0; i < 8000; ++i) {
      walks[random() % walks.size()]->step();
    }
    for (const auto& each : walks) { // or nothing has been tested
      CHECK(each->committed > 50);
      CHECK(each->failed > 20);
      served += each->served;
      dropped += each->dropped;
    }
  }
  CHECK(served > 50);
  CHECK(dropped > 50);
}

TEST(random_walks_keep_to_the_model_where_the_caller_copies) {
  walk(Copies::kOnCaller);
}

TEST(random_walks_keep_to_the_model_where_streams_copy) {
  walk(Copies::kOnStreams);
}

} // namespace
} // namespace torch_lms
