#pragma once

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

/// One block of a device allocator.
struct AllocatorBlock {
  const void* address;
  size_t nbytes;
  bool free;
};

constexpr size_t kMaxDevices = 65; // the CPU, then CUDA devices

/// The place of a device, the CPU's or a CUDA one, among `kMaxDevices`.
size_t index_of(c10::Device device);

/// What the extension needs of one device: its backend, its allocator and how
/// much of it is in use. One object a device, made on first use, never destroyed.
///
/// Thread-safe: every method may be called from any thread.
class Device {
 public:
  virtual ~Device() = default;

  virtual c10::Device device() const = 0;
  virtual const std::shared_ptr<TransferBackend>& backend() const = 0;
  virtual const std::shared_ptr<HostPool>& pool() const = 0;

  /// Whether `data` is a block of the device allocator that may be moved.
  virtual bool owns(const c10::DataPtr& data) const = 0;

  /// The stream that the calling thread submits to, as `allocate` takes it.
  virtual int64_t current_stream() const = 0;

  /// The calling thread is about to submit work that uses entities.
  virtual void note_current_stream() = 0;

  /// Nobody has noted streams so far: work that uses entities may be on any.
  virtual void note_busy_streams() = 0;

  /// A new block, to be used on `stream`. May take the allocator's lock.
  virtual c10::DataPtr allocate(size_t nbytes, int64_t stream) = 0;

  /// The block is read by a page-out that has been called off.
  virtual void keep_block_for_copy(const c10::DataPtr& data) = 0;
  /// The block is written to by a page-in that nobody waits for.
  virtual void keep_block_for_arrival(const c10::DataPtr& data) = 0;

  /// Bytes that tensors hold on the device, as the allocator counts them.
  virtual size_t allocated_bytes() const = 0;
  virtual size_t peak_allocated_bytes() const = 0;
  virtual void reset_peak() = 0;

  /// Whether the allocator could hand out such a block now without giving memory back to
  /// the system first, which is slow and waits for the device.
  virtual bool has_contiguous(size_t nbytes) const = 0;

  /// The allocator's blocks, segment by segment, in the order of their addresses.
  /// Empty where fragmentation does not exist. Slow.
  virtual std::vector<std::vector<AllocatorBlock>> blocks() const = 0;

  /// Total memory of the device.
  virtual size_t total_bytes() const = 0;

  /// Makes the allocator ask `MemoryPressure` before it hands out memory, and
  /// keep its pool within the limit; undone by `uncontrol`.
  virtual void control(size_t limit_bytes) = 0;
  virtual void uncontrol() = 0;

  /// Whether a graph is being captured on the device: nothing moves then.
  virtual bool capturing() const = 0;
};

/// The device of a storage, or null if entities do not exist for its type.
Device* find_device(c10::Device device);

/// The same if it has been asked for before, else null: makes no device.
Device* known_device(c10::Device device);

/// Every device that has been found so far.
void for_each_device(void (*visit)(Device&, void*), void* context);

struct HostOptions {
  size_t limit_bytes = 0; ///< 0: derived from the machine's and the cgroup's memory.
  std::string spill_dir; ///< Empty: the system's directory for temporary files.
};

/// Options of the pools that are made from now on, and the limit of those that
/// exist already. Throws Error if a spill directory is in use and another given.
void configure_host(const HostOptions& options);

} // namespace torch_lms
