#include <extension/cuda/CudaDevice.h>

#include <algorithm>
#include <set>
#include <tuple>
#include <utility>

#include <ATen/cuda/Sleep.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/ScopeExit.h>

#include <entity/Error.h>
#include <extension/base/ThreadContext.h>
#include <extension/cuda/LimitedCudaAllocator.h>

namespace torch_lms {

namespace allocator = c10::cuda::CUDACachingAllocator;

namespace {

/// Every stream that PyTorch hands out for a device, the default one included. There is no
/// list of them, but they are handed out in turn: when the first comes again, all have come.
std::vector<cudaStream_t> streams_of_pytorch(c10::DeviceIndex device) {
  std::set<cudaStream_t> streams{c10::cuda::getDefaultCUDAStream(device).stream()};
  const int greatest = std::get<1>(c10::cuda::CUDAStream::priority_range()); // the lowest number
  for (int priority = 0; priority >= greatest; --priority) {
    while (streams.insert(c10::cuda::getStreamFromPool(priority, device).stream()).second) {
    }
  }
  return {streams.begin(), streams.end()};
}

} // namespace

CudaDevice::CudaDevice(c10::DeviceIndex index, std::shared_ptr<HostPool> pool)
    : index_(index), pool_(std::move(pool)), pool_streams_(streams_of_pytorch(index)) {
  auto cuda = std::make_shared<CudaTransferBackend>(
      index_, pool_, [index] { return c10::cuda::getCurrentCUDAStream(index).stream(); });
  cuda_ = cuda.get();
  backend_ = std::move(cuda);
  note_busy_streams();
}

bool CudaDevice::owns(const c10::DataPtr& data) const {
  return data.get() != nullptr && data.get() == data.get_context() &&
         data.get_deleter() == allocator::get()->raw_deleter();
}

int64_t CudaDevice::current_stream() const {
  return c10::cuda::getCurrentCUDAStream(index_).id();
}

void CudaDevice::note_current_stream() {
  cuda_->note_stream(c10::cuda::getCurrentCUDAStream(index_).stream());
}

void CudaDevice::note_busy_streams() {
  cuda_->note_busy_streams(pool_streams_);
}

FencePtr CudaDevice::submitted_to(int64_t stream) {
  return cuda_->submitted_to(
      c10::cuda::CUDAStream::unpack3(stream, index_, c10::DeviceType::CUDA).stream());
}

c10::DataPtr CudaDevice::allocate(size_t nbytes, int64_t stream) {
  const auto home = c10::cuda::CUDAStream::unpack3(stream, index_, c10::DeviceType::CUDA);
  const c10::cuda::CUDAStreamGuard guard(home);
  // Asking for what is not there would make the allocator give memory back to the
  // system, and wait for the device.
  const bool prefetch = this_thread().for_prefetch;
  if (prefetch && !has_contiguous(nbytes)) {
    throw NoRoom("expected a free block for a prefetch, found none; it stays on the host");
  }
  c10::DataPtr data = allocator::get()->allocate(nbytes);
  if (prefetch && !has_contiguous(this_thread().contiguous_reserve_bytes)) {
    throw NoRoom(
        "expected a prefetch to leave room for ops, found too little; it stays on the host");
  }
  return data;
}

c10::DataPtr CudaDevice::allocate_placeholder(size_t nbytes) {
  const c10::cuda::CUDAGuard guard(index_);
  const PrefetchAllocations scope(/*contiguous_reserve_bytes=*/0);
  if (!has_contiguous(nbytes)) {
    throw NoRoom("expected a free block for a placeholder, found none; nothing is held");
  }
  return allocator::get()->allocate(nbytes);
}

void CudaDevice::keep_block_for_copy(void* block) {
  keep_block_for(block, {cuda_->pageout_stream()});
}

void CudaDevice::keep_block_for_arrival(void* block) {
  keep_block_for(block, {cuda_->pagein_stream()});
}

/// What record_stream told of a storage's earlier block is lost: every stream counts as in use.
void CudaDevice::keep_block_for_streams(void* block) {
  keep_block_for(block, cuda_->noted_streams());
}

void CudaDevice::keep_block_for(void* block, const std::vector<cudaStream_t>& streams) const {
  // The allocator looks at no more than the address and the deleter.
  c10::DataPtr data(block, block, allocator::get()->raw_deleter(), device());
  const auto still_its_owners = c10::make_scope_exit([&data] { data.release_context(); });
  for (cudaStream_t used : streams) {
    allocator::recordStream(data, c10::cuda::getStreamFromExternal(used, index_));
  }
}

DeviceUse CudaDevice::use() const {
  const auto stats = allocator::get()->getDeviceStats(index_);
  return {
      static_cast<size_t>(stats.allocated_bytes[0].current),
      static_cast<size_t>(stats.allocated_bytes[0].peak),
      static_cast<size_t>(stats.reserved_bytes[0].current)};
}

void CudaDevice::reset_peak() {
  allocator::get()->resetPeakStats(index_);
}

/// Note [Free memory that is known of]
/// Every large allocation asks for a free block that is large enough, and to look for one takes
/// PyTorch's allocator the longer the more blocks it has. What has been found once is there until
/// it has been allocated, or given back to the driver, which the allocator counts. (What is
/// reserved does not tell: as much may have been mapped elsewhere.) So the allocator is not asked
/// again before as much may have been taken. A block is at most twice as large as what was asked
/// for, or leaves less than a small block unused.

void CudaDevice::note_taken(size_t nbytes) noexcept {
  if (nbytes > kLargestSmallBlock) {
    taken_bytes_.fetch_add(2 * nbytes + kLargestSmallBlock, std::memory_order_relaxed);
  }
}

bool CudaDevice::has_contiguous(size_t nbytes) const {
  const size_t limit = reserved_limit_bytes_.load(std::memory_order_relaxed);
  if (limit == SIZE_MAX) {
    return true; // Nothing but the device itself limits the allocator.
  }
  const auto stats = allocator::get()->getDeviceStats(index_);
  const auto reserved = static_cast<size_t>(stats.reserved_bytes[0].current);
  if (reserved <= limit && nbytes <= limit - reserved) {
    return true;
  }
  const size_t taken = taken_bytes_.load(std::memory_order_relaxed); // before the look
  if (given_back_.load(std::memory_order_relaxed) == stats.num_device_free &&
      taken + nbytes <= free_until_.load(std::memory_order_relaxed)) {
    return true;
  }
  size_t largest = 1; // anything but 0, which would ask the driver
  allocator::get()->cacheInfo(index_, &largest);
  free_until_.store(taken + largest, std::memory_order_relaxed);
  given_back_.store(stats.num_device_free, std::memory_order_relaxed);
  return nbytes <= largest;
}

std::vector<std::vector<AllocatorBlock>> CudaDevice::blocks() const {
  std::vector<std::vector<AllocatorBlock>> segments;
  const auto snapshot = allocator::get()->snapshot({0, 0}, /*include_traces=*/false);
  for (const auto& segment : snapshot.segments) {
    if (segment.device != index_ || !segment.is_large) {
      continue;
    }
    std::vector<AllocatorBlock> blocks;
    auto address = static_cast<uintptr_t>(segment.address);
    for (const auto& block : segment.blocks) {
      blocks.push_back({reinterpret_cast<const void*>(address), block.size, !block.active});
      address += block.size;
    }
    segments.push_back(std::move(blocks));
  }
  return segments;
}

size_t CudaDevice::total_bytes() const {
  return allocator::get()->getMemoryInfo(index_).second;
}

void CudaDevice::set_fraction(size_t reserved_bytes) const {
  const auto total = static_cast<double>(total_bytes());
  const double fraction = std::min(program_fraction_, static_cast<double>(reserved_bytes) / total);
  LimitedCudaAllocator::get().setMemoryFraction(fraction, index_);
}

namespace {

class EventMark final : public TimeMark {
 public:
  explicit EventMark(cudaStream_t stream) {
    C10_CUDA_CHECK(cudaEventCreateWithFlags(&event_, cudaEventDefault));
    C10_CUDA_CHECK(cudaEventRecord(event_, stream));
  }
  ~EventMark() override {
    C10_CUDA_CHECK_WARN(cudaEventDestroy(event_));
  }
  EventMark(const EventMark&) = delete;
  EventMark& operator=(const EventMark&) = delete;

  double us_since(const TimeMark& earlier) const override {
    C10_CUDA_CHECK(cudaEventSynchronize(event_));
    float passed_ms = 0;
    C10_CUDA_CHECK(
        cudaEventElapsedTime(&passed_ms, static_cast<const EventMark&>(earlier).event_, event_));
    return 1000.0 * passed_ms;
  }
  bool passed() const override {
    const cudaError_t found = C10_CUDA_ERROR_HANDLED(cudaEventQuery(event_));
    if (found == cudaErrorNotReady) {
      (void)cudaGetLastError(); // else the next check of PyTorch's would find it
      return false;
    }
    C10_CUDA_CHECK(found);
    return true;
  }

 private:
  cudaEvent_t event_ = nullptr;
};

} // namespace

std::chrono::microseconds CudaDevice::let_host_lead() {
  constexpr int64_t kCycles = 600000; // PyTorch takes much less to submit all of an op
  constexpr int64_t kMostCyclesPerUs = 2000; // of all these devices
  const c10::cuda::CUDAGuard guard(index_);
  at::cuda::sleep(kCycles);
  return std::chrono::microseconds(kCycles / kMostCyclesPerUs);
}

std::shared_ptr<TimeMark> CudaDevice::mark_time() {
  const c10::cuda::CUDAGuard guard(index_);
  return std::make_shared<EventMark>(c10::cuda::getCurrentCUDAStream(index_).stream());
}

void CudaDevice::limit(size_t limit_bytes, Room& room) {
  grant(0, 0);
  free_until_.store(0); // nobody has counted what has been taken without a limit
  if (!has_limit()) {
    program_fraction_ = allocator::get()->getMemoryFraction(index_);
  }
  LimitedCudaAllocator::get().install(room, *this);
  // The allocator grows in granules, and checks its limit before it rounds to them.
  const size_t granule = std::min(limit_bytes / 8, size_t{24} << 20);
  reserved_limit_bytes_.store(limit_bytes - granule);
  set_fraction(limit_bytes - granule);
  limit_bytes_.store(limit_bytes);
}

void CudaDevice::unlimit() {
  if (!has_limit()) {
    return; // there may be no allocator to ask
  }
  limit_bytes_.store(0);
  reserved_limit_bytes_.store(SIZE_MAX);
  set_fraction(SIZE_MAX);
  LimitedCudaAllocator::get().uninstall();
}

CudaDevice::BeyondLimit::BeyondLimit(CudaDevice& device) : device_(device) {
  std::lock_guard<std::mutex> lock(device_.beyond_mutex_);
  device_.set_fraction(SIZE_MAX);
  ++device_.beyond_limit_;
}

CudaDevice::BeyondLimit::~BeyondLimit() {
  std::lock_guard<std::mutex> lock(device_.beyond_mutex_);
  if (--device_.beyond_limit_ != 0) {
    return;
  }
  try {
    try {
      device_.set_fraction(device_.reserved_limit_bytes_.load());
    } catch (const std::exception& error) { // the device is in error, and does not answer
      TORCH_WARN("torch_lms: the limit is not kept any more: ", error.what());
    }
  } catch (const std::exception&) { // nor is there memory to say so
  }
}

bool CudaDevice::capturing() const {
  const LimitedCudaAllocator& limited = LimitedCudaAllocator::get();
  // Every op asks. Where each capture announces its pool, and on the default stream, which cannot
  // be captured, the driver need not be asked.
  return limited.capturing() ||
         (!limited.installed() && c10::cuda::getCurrentCUDAStream().stream() != nullptr &&
          c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None);
}

} // namespace torch_lms
