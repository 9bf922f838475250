#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include <c10/core/StorageImpl.h>
#include <c10/core/impl/CudaEntityTransferQueue.h>
#include <c10/core/impl/EntityPager.h>
#include <c10/core/impl/HostPool.h>
#include <c10/core/impl/SwapDevice.h>

namespace c10 {
namespace impl {

/// What paging has done, and where things are now. See `SwapCounters` for the counters.
struct SwapStats {
  int64_t pageouts = 0;
  int64_t pageout_bytes = 0;
  int64_t pageins = 0;
  int64_t pagein_bytes = 0;
  int64_t passive_pageins = 0;
  int64_t prefetches = 0;
  int64_t prefetch_hits = 0;
  int64_t cancelled_pageouts = 0;
  int64_t pagein_failures = 0;
  int64_t paged_out_storages = 0;
  int64_t paged_out_bytes = 0;
  int64_t tracked_storages = 0; ///< Paged out at least once; dead ones not yet swept included.
  torch_lms::HostPoolStats host; ///< Of all devices together.
};

/// The context of transfers: two queues with a worker each. One object, made on first use,
/// never destroyed. Storages that are paged out stay usable when it is closed.
///
/// Thread-safe: every method may be called from any thread. None needs Python's lock, and
/// callers that hold it let go of it first.
///
/// A child that was forked while it was open has no workers. Storages that are out come back there
/// when they are accessed, with the bytes of the moment of the fork (those of CUDA cannot: CUDA
/// does not work there); all methods but `is_open`, `pagein_all`, `state` and `stats` throw Error.
class C10_API SwapEnvironment {
 public:
  static SwapEnvironment& get();

  /// Opens the environment; `host_limit_bytes` is that of the memory for paged-out bytes, 0
  /// for a part of what the machine has. Throws Error if it is open.
  void open(size_t host_limit_bytes);

  /// Waits for all transfers, stops the workers and pages everything in. Rethrows what
  /// failed on the way; the environment is closed then, too. Throws Error if it is not open.
  void close();

  /// Another limit, from now on and for every device; 0 as in `open`.
  void set_host_limit(size_t limit_bytes);

  bool is_open() const noexcept {
    return open_.load(std::memory_order_acquire);
  }

  /// Tells one opening from another: how many there were.
  int64_t times_opened() const noexcept {
    return times_opened_.load(std::memory_order_acquire);
  }

  /// From now on prefetches wait for `prefetch_all`. Waits for those under way.
  void prefetch_init();

  /// Starts the queue of page-ins.
  void prefetch_all();

  /// Waits until all page-outs are over; none can be asked for meanwhile. Rethrows what
  /// failed.
  void wait_pageouts();

  /// These wait for what is there now, whether the environment is open or not, and lock
  /// nothing. A prefetch without room is no failure. Rethrow what failed.
  void wait_pending_pageouts();
  void wait_pending_pageins();

  /// Brings every storage to its device. Rethrows what failed; the others come all the same.
  void pagein_all();

  /// Enqueues a page-out. Returns false where there is nothing to do. Throws PageoutRefused.
  bool pageout(StorageImpl& storage);

  /// Enqueues a page-in. Returns false where there is nothing to do.
  bool prefetch(StorageImpl& storage);

  /// Where the bytes of a storage are. For tests and for looking.
  torch_lms::EntityState state(const StorageImpl& storage) const;

  SwapStats stats();

  /// What tensors hold of a device; less than 0 where its allocator does not count.
  int64_t allocated_bytes(Device device) {
    return find_device(device).allocated_bytes();
  }

  /// Around a fork, for `pthread_atfork`. See Note [Threads at a fork].
  void prepare_fork();
  void after_fork_in_parent() noexcept;
  void after_fork_in_child() noexcept;

 private:
  SwapEnvironment();

  static constexpr size_t kMaxDevices = 65; // the CPU, then CUDA devices

  void check_open() const;
  SwapDevice& find_device(Device device);
  EntityPager& find_or_install_pager(StorageImpl& storage, SwapDevice& device);
  void remember(const std::shared_ptr<EntityPaging>& paging);
  void stop_pageins();
  using Queue = torch_lms::CudaEntityTransferQueue;
  void after_fork(void (torch_lms::HostPool::*of_pool)(), void (Queue::*of_queue)()) noexcept;
  template <typename Visit>
  void visit_pools_locked(const Visit& visit);

  std::atomic<bool> open_{false};
  std::atomic<int64_t> times_opened_{0};
  std::mutex open_mutex_; // one thread opens or closes
  torch_lms::CudaEntityTransferQueue out_;
  torch_lms::CudaEntityTransferQueue in_;

  std::mutex devices_mutex_;
  size_t host_limit_bytes_ = 0;
  std::array<std::unique_ptr<SwapDevice>, kMaxDevices> devices_;

  std::mutex pagings_mutex_;
  std::vector<std::weak_ptr<EntityPaging>> pagings_;
  size_t prune_at_ = 1024;
};

} // namespace impl
} // namespace c10
