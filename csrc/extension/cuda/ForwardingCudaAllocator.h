#pragma once

#include <c10/cuda/CUDACachingAllocator.h>

#include <extension/base/Compat.h>

namespace torch_lms {

namespace cuda_allocator = c10::cuda::CUDACachingAllocator;

/// An allocator in front of PyTorch's, which does all but the allocations: those are for who
/// derives. In a file of its own, since it says nothing but the interface, which differs by
/// version.
///
/// Thread-safe, and blocks, as what it forwards to.
class ForwardingCudaAllocator : public cuda_allocator::CUDAAllocator {
 public:
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

 protected:
  cuda_allocator::CUDAAllocator* inner_ = nullptr; // set up before anything is forwarded
};

} // namespace torch_lms
