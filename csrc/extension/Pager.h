#pragma once

#include <atomic>
#include <mutex>
#include <vector>

#include <c10/core/Storage.h>
#include <entity/CudaEntityTransferQueue.h>

#include <extension/Arrivals.h>
#include <extension/Device.h>
#include <extension/DirectPrefetches.h>
#include <extension/EntityTable.h>
#include <extension/Stats.h>

namespace torch_lms {

/// Pages storages out and in: the entities of this process, the two transfer
/// queues, and the commits. One object, made on first use, never destroyed.
///
/// Commits happen on threads that run ops: at the boundaries of ops, when memory
/// is asked for and in the waits. So a storage moves only inside a call into
/// PyTorch or torch-lms, never between two statements of a program.
///
/// Thread-safe: every method may be called from any thread.
class Pager {
 public:
  static Pager& get();

  /// Enqueues a page-in. Returns false where there is nothing to do.
  bool prefetch(const c10::Storage& storage);

  /// Enqueues a page-out that `MemoryPressure` has chosen. Returns false if the
  /// entity is in use or not resident.
  bool evict(const EntityPtr& entity);

  /// A page-out has been requested that the queue did not take.
  void take_back(const EntityPtr& entity);

  /// Starts a prefetch that `MemoryPressure` has chosen: on the calling thread where
  /// copies are asynchronous (its place among the ops decides what it waits for), in
  /// the queue otherwise. Returns false if it could not be started.
  bool prefetch_ahead(const EntityPtr& entity, size_t contiguous_reserve_bytes);

  /// Calls off the latest prefetch that nobody has used yet; its memory is free at once
  /// and nothing has to be copied out. Returns false if there is none.
  bool cancel_last_prefetch();

  /// Calls off prefetches that have not begun; returns their bytes.
  size_t cancel_prefetches();

  /// Waits until all page-outs are committed. Rethrows what failed.
  void wait_pageouts();
  /// Waits until all page-ins are committed. Rethrows what failed, but for
  /// prefetches that found no room: those are counted and stay paged out.
  void wait_pageins();

  /// Commits what the workers have finished. `allocating`: the device whose allocator's
  /// lock the caller holds, if any. No storage may be destroyed then, and nothing of
  /// another device is freed, whose lock another thread may hold while it wants this one.
  void commit_finished(const Device* allocating = nullptr);

  bool has_finished() const noexcept {
    return out_.has_finished() || in_.has_finished();
  }

  /// The entity of a storage: one that exists (null if none does), or a new one.
  /// `fresh`: the storage was made by an op that has just run.
  EntityPtr find(c10::StorageImpl& storage);
  EntityPtr find_or_track(c10::StorageImpl& storage, bool fresh);

  /// The calling thread uses an entity, which it has pinned. Returns false if the
  /// bytes could not be brought to the device: the host copy serves instead.
  bool use(const EntityPtr& entity);

  /// The calling thread has pinned an entity: it stays, if it was on its way out.
  void call_off_pageout(const EntityPtr& entity);

  /// Raw mutable access to a watched storage.
  void raw_access(c10::StorageImpl* storage);

  /// A paged-out storage died or was given other memory.
  void storage_released(const EntityPtr& entity) noexcept;

  /// Makes a storage's memory stay where it is from now on.
  void keep_resident(const c10::Storage& storage);
  void release_resident(const c10::Storage& storage);

  /// Pages everything in. Throws if the device has no room.
  void pagein_all();

  /// Whether anything is paged out or on its way: ops have to be observed.
  bool active() const noexcept {
    return paged_out_storages() != 0 || in_motion() || in_.pending_bytes() != 0;
  }

  /// Whether a storage that holds device memory may be on its way out, or its bytes on
  /// their way in: ops have to look it up.
  bool in_motion() const noexcept {
    return out_.pending_bytes() != 0 || arrivals_.any() || requests_.load() != 0;
  }

  /// The number of requests by hand that are being made: see `PageoutBatch`.
  std::atomic<size_t>& requests() noexcept {
    return requests_;
  }

  /// See `Arrivals`.
  Arrivals& arrivals() noexcept {
    return arrivals_;
  }

  CudaEntityTransferQueue& out_queue() {
    return out_;
  }
  CudaEntityTransferQueue& in_queue() {
    return in_;
  }
  EntityTable& table() {
    return table_;
  }
  Stats& stats() {
    return stats_;
  }
  int64_t paged_out_bytes() const noexcept {
    return paged_out_bytes_.load(std::memory_order_relaxed);
  }
  int64_t paged_out_storages() const noexcept {
    return paged_out_storages_.load(std::memory_order_relaxed);
  }

 private:
  Pager();

  void settle_prefetches();
  bool enqueue_prefetch(const EntityPtr& entity);
  void commit_pageouts(std::vector<KeepAlive>& dropped, const Device* allocating);
  void commit_pageins();
  bool commit_pagein(const FinishedTransfer& finished);
  void count(const EntityPtr& entity, AccessResult result);
  void left_host(const EntityStorageImpl& entity) noexcept;

  EntityTable table_;
  CudaEntityTransferQueue out_;
  CudaEntityTransferQueue in_;
  Stats stats_;
  std::atomic<int64_t> paged_out_bytes_{0};
  std::atomic<int64_t> paged_out_storages_{0};

  DirectPrefetches direct_;
  Arrivals arrivals_;
  std::atomic<size_t> requests_{0};

  std::mutex dropped_mutex_;
  std::vector<KeepAlive> dropped_; // to be destroyed outside of an allocator
};

} // namespace torch_lms
