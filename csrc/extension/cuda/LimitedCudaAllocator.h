#pragma once

#include <array>
#include <atomic>
#include <mutex>
#include <utility>
#include <vector>

#include <extension/cuda/CudaDevice.h>
#include <extension/cuda/ForwardingCudaAllocator.h>
#include <extension/memory/Room.h>

namespace torch_lms {

/// PyTorch's CUDA allocator, asked only after `Room` has been made, and
/// asked again after it has made more where fragmentation made the allocation
/// fail. It knows what the `FreeMemoryCallback` does not: how much is wanted; and it
/// holds no lock, so it may wait. Everything else is forwarded.
///
/// Blocks are PyTorch's own, deleter included, so they outlive `uninstall`.
///
/// PyTorch has one allocator for all devices, and the callback of `FinishedPageouts` has no
/// context: so this is one object of the process, never destroyed.
///
/// Thread-safe: every method may be called from any thread, with and without the GIL. Allocations
/// wait as `Room` does; all others do what PyTorch's do.
class LimitedCudaAllocator final : public ForwardingCudaAllocator {
 public:
  static LimitedCudaAllocator& get();

  /// Takes the place of PyTorch's allocator, and asks `room` for `device`.
  void install(Room& room, CudaDevice& device);
  /// Puts PyTorch's allocator back.
  void uninstall();

  bool installed() const noexcept {
    return inner_ != nullptr && cuda_allocator::allocator.load() == this;
  }

  /// Whether memory is being allocated to a private pool (a graph's capture).
  bool capturing() const noexcept {
    return captures_.load(std::memory_order_relaxed) != 0;
  }

  /// For the current device, whose allocator's lock is held. Returns whether it has a limit.
  bool vacate_finished();

  c10::DataPtr allocate(size_t nbytes) override;
  void* raw_alloc(size_t nbytes) override;
  void* raw_alloc_with_stream(size_t nbytes, cudaStream_t stream) override;
  void beginAllocateToPool(
      c10::DeviceIndex device,
      c10::MempoolId_t pool,
      std::function<bool(cudaStream_t)> filter) override;
  void endAllocateToPool(c10::DeviceIndex device, c10::MempoolId_t pool) override;

 private:
  LimitedCudaAllocator() = default;

  /// Calls `allocate`, making room before it and again while it fails.
  template <typename Allocate>
  auto with_room(size_t nbytes, Allocate&& allocate);
  template <typename Allocate>
  auto again_with_more_room(
      Room& room,
      CudaDevice& device,
      size_t nbytes,
      const c10::OutOfMemoryError& error,
      Allocate&& allocate);
  CudaDevice* current_device() const;

  std::atomic<Room*> room_{nullptr};
  std::array<std::atomic<CudaDevice*>, 64> devices_{}; // those with a limit, by index
  std::mutex pools_mutex_; // guards what follows
  std::vector<std::pair<c10::DeviceIndex, c10::MempoolId_t>> pools_; // that have begun here
  std::atomic<size_t> captures_{0}; // their number
};

} // namespace torch_lms
