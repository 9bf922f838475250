#pragma once

#include <array>
#include <atomic>

#include <c10/cuda/CUDACachingAllocator.h>

#include <extension/base/Compat.h>
#include <extension/cuda/CudaDevice.h>
#include <extension/memory/Room.h>

namespace torch_lms {

namespace cuda_allocator = c10::cuda::CUDACachingAllocator;

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
class LimitedCudaAllocator final : public cuda_allocator::CUDAAllocator {
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

  /// For the current device, whose allocator's lock is held. Returns whether there was anything.
  bool vacate_finished();

  c10::DataPtr allocate(size_t nbytes) override;
  void* raw_alloc(size_t nbytes) override;
  void* raw_alloc_with_stream(size_t nbytes, cudaStream_t stream) override;
  void beginAllocateToPool(
      c10::DeviceIndex device,
      c10::MempoolId_t pool,
      std::function<bool(cudaStream_t)> filter) override;
  void endAllocateToPool(c10::DeviceIndex device, c10::MempoolId_t pool) override;

  // --- forwarded ---
  c10::DeleterFnPtr raw_deleter() const override;
  bool is_simple_data_ptr(const c10::DataPtr& data) const override;
  void copy_data(void* to, const void* from, size_t nbytes) const override;
  bool initialized() override;
  void emptyCache(c10::MempoolId_t pool) override;
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override;
  void resetAccumulatedStats(c10::DeviceIndex device) override;
  void resetPeakStats(c10::DeviceIndex device) override;
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override;
  void raw_delete(void* data) override;
  void init(int device_count) override;
  double getMemoryFraction(c10::DeviceIndex device) override;
  void setMemoryFraction(double fraction, c10::DeviceIndex device) override;
  std::vector<cuda_allocator::StreamSegmentSize> getExpandableSegmentSizes(
      c10::DeviceIndex device) override;
  void enable(bool value) override;
  bool isEnabled() const override;
  void cacheInfo(c10::DeviceIndex device, size_t* largest_block) override;
  void* getBaseAllocation(void* data, size_t* size) override;
  using CUDAAllocator::recordStream;
  void recordStream(const c10::DataPtr& data, c10::cuda::CUDAStream stream) override;
  cuda_allocator::SnapshotInfo snapshot(c10::MempoolId_t pool, bool include_traces) override;
  void releasePool(c10::DeviceIndex device, c10::MempoolId_t pool) override;
  int getPoolUseCount(c10::DeviceIndex device, c10::MempoolId_t pool) override;
  void createOrIncrefPool(
      c10::DeviceIndex device,
      c10::MempoolId_t pool,
      std::shared_ptr<CUDAAllocator> allocator) override;
  void setUseOnOOM(c10::DeviceIndex device, c10::MempoolId_t pool, bool use_on_oom) override;
  void setNoSplit(c10::DeviceIndex device, c10::MempoolId_t pool) override;
  bool checkPoolLiveAllocations(
      c10::DeviceIndex device,
      c10::MempoolId_t pool,
      const std::unordered_set<void*>& expected) override;
  cuda_allocator::ShareableHandle shareIpcHandle(void* data) override;
  std::shared_ptr<void> getIpcDevPtr(std::string handle) override;
  bool isHistoryEnabled() override;
  void recordHistory(
      bool enabled,
      cuda_allocator::CreateContextFn recorder,
      size_t max_entries,
      cuda_allocator::RecordContext when,
      bool clear,
      const std::vector<std::string>& skip) override;
  void recordAnnotation(const std::vector<std::pair<std::string, std::string>>& entries) override;
  void pushCompileContext(std::string& context) override;
  void popCompileContext() override;
  void setUserMetadata(const std::string& metadata) override;
  std::string getUserMetadata() override;
  void attachOutOfMemoryObserver(cuda_allocator::OutOfMemoryObserver observer) override;
  void attachAllocatorTraceTracker(cuda_allocator::AllocatorTraceTracker tracker) override;
  void enablePeerAccess(c10::DeviceIndex device, c10::DeviceIndex peer) override;
  cudaError_t memcpyAsync(
      void* to,
      int to_device,
      const void* from,
      int from_device,
      size_t count,
      cudaStream_t stream,
      bool p2p_enabled) override;
  std::shared_ptr<cuda_allocator::AllocatorState> getCheckpointState(
      c10::DeviceIndex device,
      c10::MempoolId_t pool) override;
  cuda_allocator::CheckpointDelta setCheckpointPoolState(
      c10::DeviceIndex device,
      std::shared_ptr<cuda_allocator::AllocatorState> state) override;
  std::string name() override;
#if TORCH_LMS_TORCH_AT_LEAST(2, 13)
  void markCaptureBegin(c10::DeviceIndex device) override;
  void markCaptureEnd(c10::DeviceIndex device) override;
  std::shared_ptr<c10::GatheredContext> getContextForPointer(const void* data) override;
  void attachOomRejectionObserver(cuda_allocator::OomRejectionObserver observer) override;
  c10::DataPtr allocateWithAddress(size_t nbytes, void* address) override;
#endif
#if TORCH_LMS_TORCH_AT_LEAST(2, 15)
  bool supportsUserMetadata() override;
  void annotateMemory(const void* data, const std::string& metadata) override;
#endif

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

  cuda_allocator::CUDAAllocator* inner_ = nullptr;
  std::atomic<Room*> room_{nullptr};
  std::array<std::atomic<CudaDevice*>, 64> devices_{}; // those with a limit, by index
  std::atomic<int> captures_{0};
};

} // namespace torch_lms
