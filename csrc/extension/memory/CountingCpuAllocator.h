#pragma once

#include <atomic>
#include <cstddef>

#include <c10/core/Allocator.h>

#include <extension/memory/CpuBlocks.h>

namespace torch_lms {

class Device;
class Room;

/// An allocator of main memory that counts what tensors hold and keeps it within
/// its device's limit. Large blocks are mapped on their own, so that freeing one gives its
/// memory back to the system at once; a header in front of each block tells its
/// size and its origin.
///
/// Never destroyed. Thread-safe: every method may be called from any thread. `allocate` may
/// wait as `Room::make_room` does; the others block on nothing.
class CountingCpuAllocator final : public c10::Allocator {
 public:
  explicit CountingCpuAllocator(Device& device) : device_(device) {}

  /// Makes this PyTorch's allocator of main memory. Blocks of the allocator before
  /// it stay with that one. No effect when called again.
  void install();
  /// Puts the allocator before it back.
  void uninstall();

  /// From now on `allocate` asks `room` (null: nobody), and keeps within the device's limit.
  /// What is beyond a new limit already stays.
  void ask(Room* room) noexcept {
    room_.store(room);
  }

  /// Throws c10::OutOfMemoryError if the limit cannot be kept, NoRoom for a prefetch.
  c10::DataPtr allocate(size_t nbytes) override;
  c10::DeleterFnPtr raw_deleter() const override;
  void copy_data(void* to, const void* from, size_t nbytes) const override;

  size_t allocated_bytes() const noexcept {
    return allocated_bytes_.load(std::memory_order_relaxed);
  }
  size_t peak_bytes() const noexcept {
    return peak_bytes_.load(std::memory_order_relaxed);
  }
  void reset_peak() noexcept {
    peak_bytes_.store(allocated_bytes());
  }

 private:
  struct Header;

  static void free_block(void* data);
  void* allocate_block(size_t total_bytes);
  bool reserve(size_t nbytes, size_t limit_bytes) noexcept;
  void note_peak() noexcept;
  void reserve_within_limit(Room& room, size_t nbytes);

  Device& device_;
  CpuBlocks blocks_;
  c10::Allocator* before_ = nullptr;
  std::atomic<Room*> room_{nullptr};
  std::atomic<size_t> allocated_bytes_{0};
  std::atomic<size_t> peak_bytes_{0};
};

} // namespace torch_lms
