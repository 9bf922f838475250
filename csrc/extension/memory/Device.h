#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <c10/core/Allocator.h>
#include <c10/core/StorageImpl.h>
#include <entity/HostPool.h>
#include <entity/TransferBackend.h>

namespace torch_lms {

class Room;

/// One block of a device allocator.
struct AllocatorBlock {
  const void* address;
  size_t nbytes;
  bool free;
};

/// A moment in the work that a thread submits to a device.
class TimeMark {
 public:
  virtual ~TimeMark() = default;
  /// Waits until it has been reached. `earlier` is the same device's.
  virtual double us_since(const TimeMark& earlier) const = 0;
  /// Whether it has been reached. Waits for nothing.
  virtual bool passed() const {
    return true;
  }
};

/// Bytes on a device, as its allocator counts them.
struct DeviceUse {
  size_t allocated_bytes = 0; ///< In tensors.
  size_t peak_allocated_bytes = 0;
  size_t reserved_bytes = 0; ///< Held by the allocator, the former included.
};

/// What the extension needs of one device: its backend, its streams, its allocator, how much
/// of it is in use, and its limit. One object a device, made on first use, never destroyed.
///
/// Thread-safe: every method may be called from any thread, with and without the GIL. None
/// waits for anything but the device's driver and, where it says so, its allocator's lock.
class Device {
 public:
  virtual ~Device() = default;

  virtual c10::Device device() const = 0;
  virtual const std::shared_ptr<TransferBackend>& backend() const = 0;
  virtual const std::shared_ptr<HostPool>& pool() const = 0;

  /// Whether `data` is a block of the device allocator that may be moved.
  virtual bool owns(const c10::DataPtr& data) const = 0;
  /// Whether memory that it owns counts for its limit.
  virtual bool counts(const c10::DataPtr& /*data*/) const {
    return true;
  }

  /// The stream that the calling thread submits to, as `allocate` takes it.
  virtual int64_t current_stream() const = 0;

  /// The calling thread is about to submit work that uses entities.
  virtual void note_current_stream() = 0;

  /// Nobody has noted streams so far: work that uses entities may be on any.
  virtual void note_busy_streams() = 0;

  /// A new block, to be used on `stream`, and on no other until `keep_block_for_streams`. Takes the
  /// allocator's lock; makes room before it, as `Room::make_room`, unless the thread allocates for
  /// prefetches. Throws c10::OutOfMemoryError, or NoRoom for a prefetch.
  virtual c10::DataPtr allocate(size_t nbytes, int64_t stream) = 0;

  /// A fence behind the work on one stream. No lock is taken.
  virtual FencePtr submitted_to(int64_t stream) = 0;

  /// A block of the calling thread's stream that nobody will write to: free at once when it is
  /// given back. Takes the allocator's lock, and makes no room. Throws c10::OutOfMemoryError, or
  /// NoRoom if it would have to be mapped first.
  virtual c10::DataPtr allocate_placeholder(size_t nbytes);

  /// The block is read by a page-out that has been called off. Takes the allocator's lock.
  /// Like the next two, it takes the block's address: a block that is watched may have an owner of
  /// which the allocator knows nothing (Note [Watched blocks]), and would be passed over.
  virtual void keep_block_for_copy(void* block) = 0;
  /// The block is written to by a page-in that nobody waits for. Takes the allocator's lock.
  virtual void keep_block_for_arrival(void* block) = 0;
  /// The block may be in use on every stream that has been noted. Takes the allocator's lock.
  virtual void keep_block_for_streams(void* block) = 0;

  /// Slow where there is a lock and a lot to copy: see `spend`.
  virtual DeviceUse use() const = 0;
  virtual void reset_peak() = 0;

  /// Whether the allocator could hand out such a block now without giving memory back to
  /// the system first, which is slow and waits for the device.
  virtual bool has_contiguous(size_t nbytes) const = 0;

  /// The allocator's blocks, segment by segment, in the order of their addresses.
  /// Empty where fragmentation does not exist. Slow.
  virtual std::vector<std::vector<AllocatorBlock>> blocks() const = 0;

  /// The device does something else for a moment, on the calling thread's stream, so that what is
  /// submitted next is there before it can begin: its time is the device's own then. Returns for
  /// how long at least; nothing where ops are over when they return.
  virtual std::chrono::microseconds let_host_lead() {
    return {};
  }

  /// Now, on the calling thread's stream; the clock's time where ops are over when they return.
  virtual std::shared_ptr<TimeMark> mark_time();

  /// Total memory of the device.
  virtual size_t total_bytes() const = 0;

  /// From now on the allocator asks `room` before it hands out memory. Undone by `unlimit`,
  /// after which a limit of 0 holds. Called again, it changes the limit.
  virtual void limit(size_t limit_bytes, Room& room) = 0;
  virtual void unlimit() = 0;

  /// Whether a graph is being captured on the device: nothing moves then.
  virtual bool capturing() const = 0;

  /// 0 without a limit.
  size_t limit_bytes() const noexcept {
    return limit_bytes_.load(std::memory_order_relaxed);
  }

  /// Note [The budget of allocations]
  /// To ask an allocator how much is in use takes its lock. So whoever has asked grants a
  /// number of bytes that may be allocated before anybody asks again: what is freed meanwhile
  /// makes more room. (Prefetches take some, and spend none: whom the allocator refuses has the
  /// budget looked at again.) While automatic mode sleeps the grant is what is missing to
  /// the watermark, and an allocation costs one atomic subtraction. While it is armed, large
  /// allocations ask each time, since the policy wants to know them.
  bool spend(size_t nbytes) noexcept {
    if (nbytes >= large_from_bytes_.load(std::memory_order_relaxed)) {
      return false;
    }
    const auto wanted = static_cast<int64_t>(nbytes);
    return budget_bytes_.fetch_sub(wanted, std::memory_order_relaxed) >= wanted;
  }
  void grant(size_t nbytes, size_t large_from_bytes) noexcept {
    large_from_bytes_.store(large_from_bytes, std::memory_order_relaxed);
    budget_bytes_.store(static_cast<int64_t>(nbytes), std::memory_order_relaxed);
  }
  int64_t budget_bytes() const noexcept {
    return budget_bytes_.load(std::memory_order_relaxed);
  }

 protected:
  std::atomic<size_t> limit_bytes_{0};
  std::atomic<int64_t> budget_bytes_{0};
  std::atomic<size_t> large_from_bytes_{0};
};

} // namespace torch_lms
