#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <thread>

#include <entity/EntityStorageImpl.h>
#include <entity/OpClock.h>

#include "fake_backend.h"
#include "fake_binding.h"
#include "harness.h"
#include "interruptions.h"

constexpr Copies kBothWays[] = {Copies::kOnCaller, Copies::kOnStreams};

constexpr torch_lms::EntityState kAllStates[] = {
    torch_lms::EntityState::kResident,
    torch_lms::EntityState::kOutQueued,
    torch_lms::EntityState::kPagingOut,
    torch_lms::EntityState::kPagedOut,
    torch_lms::EntityState::kInQueued,
    torch_lms::EntityState::kPagingIn,
};

/// Short names, for tables of states.
namespace entity_states {
using State = torch_lms::EntityState;
constexpr State R = State::kResident;
constexpr State OQ = State::kOutQueued;
constexpr State PO = State::kPagingOut;
constexpr State PD = State::kPagedOut;
constexpr State IQ = State::kInQueued;
constexpr State PI = State::kPagingIn;
} // namespace entity_states

/// One storage on a fake device, and its entity. At its end the storage's bytes must be
/// there, on the device, and then nothing of it may be left.
class EntityRig {
 public:
  using State = torch_lms::EntityState;

  explicit EntityRig(Copies copies, uint64_t first_seen = 0, size_t nbytes = 4099)
      : backend(std::make_shared<FakeBackend>(copies)),
        device(std::make_shared<FakeDevice>()),
        storage(std::make_shared<FakeStorage>(device, nbytes, seed)),
        entity(make_entity(storage, backend, first_seen)) {}
  ~EntityRig() {
    drop_transfers();
    if (storage != nullptr) {
      check_intact();
    }
    storage = nullptr;
    backend->run_all();
    CHECK_EQ(entity.use_count(), 1);
    entity = nullptr;
    CHECK_EQ(backend->hosts(), 0);
    CHECK_EQ(device->blocks.load(), 0);
  }
  EntityRig(const EntityRig&) = delete;
  EntityRig& operator=(const EntityRig&) = delete;

  /// From RESIDENT to `wanted`, by the steps that a queue would take.
  void go_to(State wanted) {
    if (wanted >= State::kOutQueued) {
      REQUIRE(entity->request_pageout());
    }
    if (wanted >= State::kPagingOut) {
      REQUIRE(entity->begin_pageout(&out));
    }
    if (wanted >= State::kPagedOut) {
      wait(out->fence);
      REQUIRE(commit_out() == torch_lms::CommitResult::kCommitted);
      out = nullptr;
    }
    if (wanted >= State::kInQueued) {
      REQUIRE(entity->request_pagein());
    }
    if (wanted >= State::kPagingIn) {
      in = entity->begin_pagein();
      REQUIRE(in != nullptr);
    }
    REQUIRE(entity->state() == wanted);
  }

  /// The block that the storage lets go of is given back, as a caller does.
  torch_lms::CommitResult commit_out() {
    std::unique_ptr<torch_lms::DeviceBlock> garbage;
    const auto result = entity->commit_pageout(out, &garbage);
    CHECK_EQ(garbage != nullptr, result == torch_lms::CommitResult::kCommitted);
    return result;
  }

  /// What a queue and the taker of its finished transfers do: no block goes under a copy.
  void drop_transfers() {
    if (out != nullptr) {
      wait_for_end(out->fence);
      if (commit_out() == torch_lms::CommitResult::kInUse) {
        entity->abandon_pageout(out);
      }
      out = nullptr;
    }
    if (in != nullptr) {
      wait_for_end(in->fence);
      in = nullptr;
    }
  }

  static void wait(const torch_lms::FencePtr& fence) {
    if (fence != nullptr) {
      fence->wait();
    }
  }

  /// As `wait`, whether the copy failed or not.
  static void wait_for_end(const torch_lms::FencePtr& fence) {
    try {
      wait(fence);
    } catch (const torch_lms::TransferFailed&) {
    }
  }

  /// An op reads the bytes.
  void check_intact() {
    entity->access();
    CHECK_EQ(entity->state(), State::kResident);
    CHECK(storage->mark == nullptr);
    CHECK(storage->block != nullptr);
    CHECK(storage->holds(seed));
  }

  /// The two directions work, with bytes that are new.
  void check_moves_again() {
    check_intact();
    write(seed + 1);
    CHECK(entity->pageout_internal_sync());
    CHECK(storage->holds(seed));
    CHECK(entity->pagein_internal_sync());
    check_intact();
  }

  void write(uint64_t new_seed) {
    seed = new_seed;
    storage->write(seed);
  }

  uint64_t seed = 7;
  const std::shared_ptr<FakeBackend> backend;
  const std::shared_ptr<FakeDevice> device;
  std::shared_ptr<FakeStorage> storage;
  std::shared_ptr<torch_lms::EntityStorageImpl> entity;
  std::shared_ptr<torch_lms::PageoutTransfer> out;
  std::shared_ptr<torch_lms::PageinTransfer> in;
};

/// A page-out that an access is calling off while a worker's copy goes on, until `open`.
class CopyBeingCalledOff {
 public:
  explicit CopyBeingCalledOff(EntityRig& rig) {
    using namespace torch_lms;
    rig.go_to(EntityState::kOutQueued);
    rig.backend->interruptions.at(BackendStep::kCopyToHost, gate_.action());
    worker_ = std::thread([&rig] { CHECK(rig.entity->begin_pageout(&rig.out)); });
    gate_.wait_until_reached();
    access_ =
        std::thread([&rig] { CHECK_EQ(rig.entity->access(), AccessResult::kCancelledPageout); });
    while (rig.entity->state() != EntityState::kResident) { // set before the access waits
      std::this_thread::yield();
    }
  }
  void open() {
    gate_.open();
  }
  void join() {
    access_.join();
    worker_.join();
  }

 private:
  Gate gate_;
  std::thread worker_;
  std::thread access_;
};
