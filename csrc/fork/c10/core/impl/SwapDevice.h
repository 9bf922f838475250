#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/impl/HostPool.h>
#include <c10/core/impl/TransferBackend.h>
#include <c10/macros/Macros.h>

namespace c10 {
namespace impl {

/// What paging needs of one device: its backend and its allocator. One object a device,
/// made on first use, never destroyed.
///
/// Thread-safe: every method may be called from any thread.
class C10_API SwapDevice {
 public:
  virtual ~SwapDevice();

  virtual Device device() const = 0;
  virtual const std::shared_ptr<torch_lms::TransferBackend>& backend() const = 0;

  /// Whether `data` is a block of PyTorch's allocator for the device, that may be moved.
  virtual bool owns(const DataPtr& data) const = 0;

  /// The stream that the calling thread submits to, as `allocate` takes it.
  virtual int64_t current_stream() const = 0;

  /// A page-out is about to be requested: its copy has to be ordered after what has been
  /// submitted up to now, on any stream.
  virtual void note_streams_in_use() = 0;

  /// The calling thread is about to use a storage that has been away.
  virtual void note_current_stream() = 0;

  /// The calling thread uses a block of `allocate` that was meant for stream `home`: the
  /// block must not be reused before what the thread's own stream does with it.
  virtual void note_use(const DataPtr& data, int64_t home) = 0;

  /// A new block, to be used on `stream`. Throws what the allocator throws, and on a
  /// queue's worker NoRoom in place of an out-of-memory error.
  virtual DataPtr allocate(size_t nbytes, int64_t stream) = 0;

  /// The block is read by a page-out that has been called off.
  virtual void keep_block_for_copy(const DataPtr& data) = 0;

  /// The block is written by a page-in that no stream of the program waits for yet.
  virtual void keep_block_for_arrival(const DataPtr& data) = 0;

  /// Whether a graph is being captured on the device: nothing may move then.
  virtual bool capturing() const = 0;

  /// The same, of those streams alone that are known to use the device. For page-outs, whose
  /// worker looks at the others.
  virtual bool capturing_in_use() {
    return capturing();
  }

  /// What the allocator has given out, in bytes; less than 0 where it does not count.
  virtual int64_t allocated_bytes() const {
    return -1;
  }

  /// The limit of the host memory for paged-out bytes, which devices of a type share; 0
  /// for a part of what the machine has.
  virtual void set_host_limit(size_t limit_bytes) = 0;

  /// The host memory for paged-out bytes; several devices may have one in common.
  virtual torch_lms::HostPool& host_pool() const = 0;
};

/// The devices of one type.
struct SwapDeviceType {
  SwapDevice* (*make)(DeviceIndex index) = nullptr;
  void (*prepare_worker)() = nullptr; ///< Runs first on every worker.
};

/// Announces the devices of a type; each backend's library does so when it is loaded.
C10_API void register_swap_devices(DeviceType type, SwapDeviceType devices);

/// What has been announced, by the number of the type; entries may be empty.
using SwapDeviceTypes = std::array<SwapDeviceType, COMPILE_TIME_MAX_DEVICE_TYPES>;
C10_API const SwapDeviceTypes& swap_device_types();

/// Whether the calling thread is a queue's worker.
C10_API bool on_swap_worker() noexcept;
C10_API void mark_swap_worker() noexcept;

} // namespace impl
} // namespace c10
