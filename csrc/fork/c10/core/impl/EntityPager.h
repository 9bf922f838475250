#pragma once

#include <cstddef>
#include <memory>
#include <mutex>

#include <c10/core/StoragePager.h>
#include <c10/core/impl/CudaEntityTransferQueue.h>
#include <c10/core/impl/ParkedMemory.h>
#include <c10/core/impl/SwapDevice.h>

namespace c10 {
namespace impl {

/// The two queues of the environment, shared by all storages.
struct SwapQueues {
  torch_lms::CudaEntityTransferQueue& out;
  torch_lms::CudaEntityTransferQueue& in;
};

/// The bytes of one storage that has been paged out at least once, for as long as the
/// storage has its pager.
///
/// Its mutex is taken before the entity's and held while memory changes hands between
/// storage and entity, so that of several threads that access a storage one brings it back
/// and the others wait. Workers never take it. Methods that end in `_locked` want it held.
class EntityPaging {
 public:
  EntityPaging(SwapDevice& device, size_t nbytes, SwapQueues queues);

  std::mutex& mutex() noexcept {
    return mutex_;
  }
  const std::shared_ptr<torch_lms::EntityStorageImpl>& entity() const noexcept {
    return entity_;
  }

  /// Takes the storage's memory over and asks for a page-out behind all work submitted so
  /// far. Returns whether the entity has to be enqueued. Throws PageoutRefused; what is in
  /// `data` is as it was then.
  bool request_pageout_locked(DataPtr& data);

  /// Asks for a page-in. Returns whether the entity has to be enqueued.
  bool request_pagein_locked();

  /// Brings the bytes to the device. Throws what the allocator throws; the host copy is
  /// intact then.
  void pagein_locked();

  /// Gives the memory back to the storage if it is on the device.
  void unpark_locked(DataPtr& data);

  /// Whether the storage has its memory and accesses have nothing to do.
  bool settled_locked() const {
    // In this order: the memory is a worker's until the entity is resident.
    return entity_->settled() && !memory_->parked();
  }

  /// Calls off a page-out that has not been enqueued.
  void cancel_pageout_locked();

  /// The storage is gone: copies under way are called off, all memory is given back.
  void release() noexcept;

 private:
  void pagein_passive_locked();
  void check_not_capturing(bool capturing) const;
  static void count_access(torch_lms::AccessResult result) noexcept;

  std::mutex mutex_;
  SwapDevice& device_;
  const SwapQueues queues_;
  ParkedMemory* memory_ = nullptr; // owned by entity_
  std::shared_ptr<torch_lms::EntityStorageImpl> entity_;
};

/// A storage's pager.
class EntityPager final : public StoragePager {
 public:
  EntityPager(SwapDevice& device, size_t nbytes, SwapQueues queues)
      : queues_(queues), paging_(std::make_shared<EntityPaging>(device, nbytes, queues)) {}
  ~EntityPager() override {
    paging_->release();
  }

  void pagein(DataPtr& data) override;

  /// Enqueues a page-out of `data`, the storage's memory. Returns false if there is nothing
  /// to do. Throws PageoutRefused, and Error while the queue is locked.
  bool pageout(DataPtr& data);

  /// Enqueues a page-in. Returns false if there is nothing to do.
  bool prefetch();

  const std::shared_ptr<EntityPaging>& paging() const noexcept {
    return paging_;
  }

 private:
  const SwapQueues queues_;
  const std::shared_ptr<EntityPaging> paging_;
};

} // namespace impl
} // namespace c10
