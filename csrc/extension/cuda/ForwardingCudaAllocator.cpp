#include <extension/cuda/ForwardingCudaAllocator.h>

#include <utility>

namespace torch_lms {

c10::DeleterFnPtr ForwardingCudaAllocator::raw_deleter() const {
  return inner_->raw_deleter();
}

bool ForwardingCudaAllocator::is_simple_data_ptr(const c10::DataPtr& data) const {
  return inner_->is_simple_data_ptr(data);
}

void ForwardingCudaAllocator::copy_data(void* to, const void* from, size_t nbytes) const {
  inner_->copy_data(to, from, nbytes);
}

bool ForwardingCudaAllocator::initialized() {
  return inner_->initialized();
}

void ForwardingCudaAllocator::emptyCache(c10::MempoolId_t pool) {
  inner_->emptyCache(pool);
}

c10::CachingDeviceAllocator::DeviceStats ForwardingCudaAllocator::getDeviceStats(
    c10::DeviceIndex device) {
  return inner_->getDeviceStats(device);
}

void ForwardingCudaAllocator::resetAccumulatedStats(c10::DeviceIndex device) {
  inner_->resetAccumulatedStats(device);
}

void ForwardingCudaAllocator::resetPeakStats(c10::DeviceIndex device) {
  inner_->resetPeakStats(device);
}

std::pair<size_t, size_t> ForwardingCudaAllocator::getMemoryInfo(c10::DeviceIndex device) {
  return inner_->getMemoryInfo(device);
}

void ForwardingCudaAllocator::raw_delete(void* data) {
  inner_->raw_delete(data);
}

void ForwardingCudaAllocator::init(int device_count) {
  inner_->init(device_count);
}

double ForwardingCudaAllocator::getMemoryFraction(c10::DeviceIndex device) {
  return inner_->getMemoryFraction(device);
}

void ForwardingCudaAllocator::setMemoryFraction(double fraction, c10::DeviceIndex device) {
  inner_->setMemoryFraction(fraction, device);
}

std::vector<cuda_allocator::StreamSegmentSize> ForwardingCudaAllocator::getExpandableSegmentSizes(
    c10::DeviceIndex device) {
  return inner_->getExpandableSegmentSizes(device);
}

void ForwardingCudaAllocator::enable(bool value) {
  inner_->enable(value);
}

bool ForwardingCudaAllocator::isEnabled() const {
  return inner_->isEnabled();
}

void ForwardingCudaAllocator::cacheInfo(c10::DeviceIndex device, size_t* largest_block) {
  inner_->cacheInfo(device, largest_block);
}

void* ForwardingCudaAllocator::getBaseAllocation(void* data, size_t* size) {
  return inner_->getBaseAllocation(data, size);
}

void ForwardingCudaAllocator::recordStream(const c10::DataPtr& data, c10::cuda::CUDAStream stream) {
  inner_->recordStream(data, stream);
}

cuda_allocator::SnapshotInfo ForwardingCudaAllocator::snapshot(
    c10::MempoolId_t pool,
    bool include_traces) {
  return inner_->snapshot(pool, include_traces);
}

void ForwardingCudaAllocator::releasePool(c10::DeviceIndex device, c10::MempoolId_t pool) {
  inner_->releasePool(device, pool);
}

int ForwardingCudaAllocator::getPoolUseCount(c10::DeviceIndex device, c10::MempoolId_t pool) {
  return inner_->getPoolUseCount(device, pool);
}

void ForwardingCudaAllocator::createOrIncrefPool(
    c10::DeviceIndex device,
    c10::MempoolId_t pool,
    std::shared_ptr<CUDAAllocator> allocator) {
  inner_->createOrIncrefPool(device, pool, std::move(allocator));
}

void ForwardingCudaAllocator::setUseOnOOM(
    c10::DeviceIndex device,
    c10::MempoolId_t pool,
    bool use_on_oom) {
  inner_->setUseOnOOM(device, pool, use_on_oom);
}

void ForwardingCudaAllocator::setNoSplit(c10::DeviceIndex device, c10::MempoolId_t pool) {
  inner_->setNoSplit(device, pool);
}

bool ForwardingCudaAllocator::checkPoolLiveAllocations(
    c10::DeviceIndex device,
    c10::MempoolId_t pool,
    const std::unordered_set<void*>& expected) {
  return inner_->checkPoolLiveAllocations(device, pool, expected);
}

cuda_allocator::ShareableHandle ForwardingCudaAllocator::shareIpcHandle(void* data) {
  return inner_->shareIpcHandle(data);
}

std::shared_ptr<void> ForwardingCudaAllocator::getIpcDevPtr(std::string handle) {
  return inner_->getIpcDevPtr(std::move(handle));
}

bool ForwardingCudaAllocator::isHistoryEnabled() {
  return inner_->isHistoryEnabled();
}

void ForwardingCudaAllocator::recordHistory(
    bool enabled,
    cuda_allocator::CreateContextFn recorder,
    size_t max_entries,
    cuda_allocator::RecordContext when,
    bool clear,
    const std::vector<std::string>& skip) {
  inner_->recordHistory(enabled, recorder, max_entries, when, clear, skip);
}

void ForwardingCudaAllocator::recordAnnotation(
    const std::vector<std::pair<std::string, std::string>>& entries) {
  inner_->recordAnnotation(entries);
}

void ForwardingCudaAllocator::pushCompileContext(std::string& context) {
  inner_->pushCompileContext(context);
}

void ForwardingCudaAllocator::popCompileContext() {
  inner_->popCompileContext();
}

void ForwardingCudaAllocator::setUserMetadata(const std::string& metadata) {
  inner_->setUserMetadata(metadata);
}

std::string ForwardingCudaAllocator::getUserMetadata() {
  return inner_->getUserMetadata();
}

void ForwardingCudaAllocator::attachOutOfMemoryObserver(
    cuda_allocator::OutOfMemoryObserver observer) {
  inner_->attachOutOfMemoryObserver(std::move(observer));
}

void ForwardingCudaAllocator::attachAllocatorTraceTracker(
    cuda_allocator::AllocatorTraceTracker tracker) {
  inner_->attachAllocatorTraceTracker(std::move(tracker));
}

void ForwardingCudaAllocator::enablePeerAccess(c10::DeviceIndex device, c10::DeviceIndex peer) {
  inner_->enablePeerAccess(device, peer);
}

cudaError_t ForwardingCudaAllocator::memcpyAsync(
    void* to,
    int to_device,
    const void* from,
    int from_device,
    size_t count,
    cudaStream_t stream,
    bool p2p_enabled) {
  return inner_->memcpyAsync(to, to_device, from, from_device, count, stream, p2p_enabled);
}

std::shared_ptr<cuda_allocator::AllocatorState> ForwardingCudaAllocator::getCheckpointState(
    c10::DeviceIndex device,
    c10::MempoolId_t pool) {
  return inner_->getCheckpointState(device, pool);
}

cuda_allocator::CheckpointDelta ForwardingCudaAllocator::setCheckpointPoolState(
    c10::DeviceIndex device,
    std::shared_ptr<cuda_allocator::AllocatorState> state) {
  return inner_->setCheckpointPoolState(device, std::move(state));
}

std::string ForwardingCudaAllocator::name() {
  return inner_->name();
}

#if TORCH_LMS_TORCH_AT_LEAST(2, 13)

void ForwardingCudaAllocator::markCaptureBegin(c10::DeviceIndex device) {
  inner_->markCaptureBegin(device);
}

void ForwardingCudaAllocator::markCaptureEnd(c10::DeviceIndex device) {
  inner_->markCaptureEnd(device);
}

std::shared_ptr<c10::GatheredContext> ForwardingCudaAllocator::getContextForPointer(
    const void* data) {
  return inner_->getContextForPointer(data);
}

void ForwardingCudaAllocator::attachOomRejectionObserver(
    cuda_allocator::OomRejectionObserver observer) {
  inner_->attachOomRejectionObserver(std::move(observer));
}

c10::DataPtr ForwardingCudaAllocator::allocateWithAddress(size_t nbytes, void* address) {
  return inner_->allocateWithAddress(nbytes, address);
}

#endif

#if TORCH_LMS_TORCH_AT_LEAST(2, 15)

bool ForwardingCudaAllocator::supportsUserMetadata() {
  return inner_->supportsUserMetadata();
}

void ForwardingCudaAllocator::annotateMemory(const void* data, const std::string& metadata) {
  inner_->annotateMemory(data, metadata);
}

#endif

} // namespace torch_lms
