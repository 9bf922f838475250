#pragma once

#include <atomic>
#include <cstddef>
#include <memory>

namespace torch_lms {

/// A point in a device's work. A null `FencePtr` is a fence that has passed.
///
/// Thread-safe: every method may be called from any thread.
class Fence {
 public:
  virtual ~Fence() = default;

  /// Whether the work before the fence has finished. Never blocks.
  virtual bool done() noexcept = 0;

  /// Blocks the calling thread until the work before the fence has finished.
  /// Throws TransferFailed if that work failed.
  virtual void wait() = 0;
};

using FencePtr = std::shared_ptr<Fence>;

/// Where the bytes of an entity go: host memory, copies and their ordering.
///
/// One backend serves one device. `CpuTransferBackend` copies on the calling
/// thread; `CudaTransferBackend` submits to streams of its own.
///
/// Thread-safe: every method may be called from any thread. No method takes a
/// lock of the state machine or of the device allocator.
class TransferBackend {
 public:
  virtual ~TransferBackend() = default;

  /// Whether copies return before they are over. If so, a thread that runs ops may
  /// submit them itself, which keeps their order with the ops; else a worker must.
  virtual bool copies_asynchronously() const noexcept = 0;

  /// Memory for a paged-out copy. Throws HostPoolFull or SpillFailed.
  virtual void* allocate_host(size_t nbytes) = 0;

  /// Gives `host` back once `after` has passed; does not wait for it.
  virtual void free_host(void* host, FencePtr after) noexcept = 0;

  /// A fence behind all work submitted so far that may use the device's memory.
  virtual FencePtr submitted_work() = 0;

  /// Copies device bytes to `host`, not before `after`. A backend that copies
  /// on the calling thread polls `cancelled` and then returns early.
  virtual FencePtr copy_to_host(
      void* host,
      const void* device,
      size_t nbytes,
      const FencePtr& after,
      const std::atomic<bool>& cancelled) = 0;

  /// Copies host bytes to `device`, not before `after`.
  virtual FencePtr copy_to_device(
      void* device,
      const void* host,
      size_t nbytes,
      const FencePtr& after) = 0;

  /// Copies between two of the device's blocks: in order with what the calling thread submits, and
  /// behind all that has been submitted by others, who go on behind it. False, and nothing is
  /// copied, where the device cannot, or takes down a graph.
  virtual bool copy_on_device(void* /*to*/, const void* /*from*/, size_t /*nbytes*/) {
    return false;
  }

  /// Work that the calling thread submits from now on starts after `fence`.
  virtual void order_after(const FencePtr& fence) = 0;
};

} // namespace torch_lms
