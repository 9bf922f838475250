#include <extension/cuda/LimitedCudaAllocator.h>

#include <algorithm>
#include <utility>

#include <c10/cuda/CUDAFunctions.h>
#include <c10/util/Exception.h>

#include <extension/base/ThreadContext.h>

namespace torch_lms {
namespace {

// Each asks for twice as much; what does not help by then will not.
constexpr int kMostRetries = 8;

/// Note [Pages of small blocks]
/// The segments of small blocks grow by mapping, for which a whole page of the other segments has
/// to be given back first, once as much is mapped as the limit allows. Many free blocks that are
/// each smaller than a page do not help. Two pages' bytes in one piece hold a whole one, wherever
/// they begin.
constexpr size_t kPageBytes = size_t{20} << 20;

size_t bytes_in_one_piece(size_t nbytes) {
  return nbytes > CudaDevice::kLargestSmallBlock ? nbytes : 2 * kPageBytes;
}

} // namespace

LimitedCudaAllocator& LimitedCudaAllocator::get() {
  static auto* allocator = new LimitedCudaAllocator();
  return *allocator;
}

void LimitedCudaAllocator::install(Room& room, CudaDevice& device) {
  room_.store(&room);
  devices_[static_cast<size_t>(device.device().index())].store(&device);
  auto* current = cuda_allocator::allocator.load();
  if (current != this) {
    inner_ = current;
    cuda_allocator::allocator.store(this);
  }
}

void LimitedCudaAllocator::uninstall() {
  if (inner_ != nullptr && cuda_allocator::allocator.load() == this) {
    cuda_allocator::allocator.store(inner_);
    std::lock_guard<std::mutex> lock(pools_mutex_);
    pools_.clear(); // their ends will be told to PyTorch's
    captures_.store(0);
  }
}

/// Null if it has no limit.
CudaDevice* LimitedCudaAllocator::current_device() const {
  CudaDevice* device = devices_[static_cast<size_t>(c10::cuda::current_device())].load();
  return device != nullptr && device->limit_bytes() != 0 ? device : nullptr;
}

bool LimitedCudaAllocator::vacate_finished() {
  CudaDevice* device = current_device();
  if (device == nullptr) {
    return false;
  }
  room_.load()->vacate_finished(*device);
  return true;
}

// --- memory --------------------------------------------------------------------

namespace {

/// `allocate`, whose time is not the op's: where no block is large enough, PyTorch's allocator
/// gives memory back to the driver and maps other, and the device waits.
template <typename Allocate>
auto beside_op(Room& room, Device& device, Allocate&& allocate) {
  struct Scope {
    Room& room;
    Device& device;
    ~Scope() {
      room.allocation_ends(device);
    }
  };
  room.allocation_begins(device);
  const Scope scope{room, device};
  return allocate();
}

} // namespace

template <typename Allocate>
auto LimitedCudaAllocator::again_with_more_room(
    Room& room,
    CudaDevice& device,
    size_t nbytes,
    const c10::OutOfMemoryError& error,
    Allocate&& allocate) {
  const size_t piece = bytes_in_one_piece(nbytes);
  size_t more = piece;
  for (int i = 0; i < kMostRetries; ++i, more *= 2) {
    const Room::Answer answer = room.after_out_of_memory(device, more);
    if (answer == Room::Answer::kRefuse) {
      break;
    }
    if (answer == Room::Answer::kGiveWay) {
      const CudaDevice::BeyondLimit beyond(device);
      return allocate();
    }
    room.make_contiguous(device, piece);
    try {
      return beside_op(room, device, allocate);
    } catch (const c10::OutOfMemoryError&) {
    }
  }
  TORCH_WARN_ONCE(
      "torch_lms: expected room within the limit for ",
      nbytes,
      " bytes, found too little with everything else paged out. A library that can do "
      "without (cuDNN takes another algorithm) rounds differently from then on: raise the "
      "limit if results have to be those of a run without one.");
  TORCH_CHECK_WITH(
      OutOfMemoryError,
      false,
      room.explain(device, nbytes),
      "\nPyTorch's allocator said: ",
      error.what_without_backtrace());
}

template <typename Allocate>
auto LimitedCudaAllocator::with_room(size_t nbytes, Allocate&& allocate) {
  CudaDevice* device = nbytes != 0 ? current_device() : nullptr;
  if (device == nullptr) {
    return allocate();
  }
  const auto take = [&] {
    auto block = allocate();
    device->note_taken(nbytes); // not before: to make room, what is free is looked for again
    return block;
  };
  if (device->spend(nbytes)) {
    try {
      return take();
    } catch (const c10::OutOfMemoryError&) { // fragmentation: the limit leaves room
    }
  }
  Room& room = *room_.load();
  const Room::Answer answer = room.make_room(*device, nbytes);
  if (answer == Room::Answer::kGiveWay) {
    const CudaDevice::BeyondLimit beyond(*device);
    return take();
  }
  room.make_contiguous(*device, nbytes);
  try {
    return beside_op(room, *device, take);
  } catch (const c10::OutOfMemoryError& error) {
    if (this_thread().for_prefetch) {
      throw; // it can do without, and nobody asks why
    }
    return again_with_more_room(room, *device, nbytes, error, take);
  }
}

c10::DataPtr LimitedCudaAllocator::allocate(size_t nbytes) {
  return with_room(nbytes, [&] { return inner_->allocate(nbytes); });
}

void* LimitedCudaAllocator::raw_alloc(size_t nbytes) {
  return with_room(nbytes, [&] { return inner_->raw_alloc(nbytes); });
}

void* LimitedCudaAllocator::raw_alloc_with_stream(size_t nbytes, cudaStream_t stream) {
  return with_room(nbytes, [&] { return inner_->raw_alloc_with_stream(nbytes, stream); });
}

void LimitedCudaAllocator::beginAllocateToPool(
    c10::DeviceIndex device,
    c10::MempoolId_t pool,
    std::function<bool(cudaStream_t)> filter) {
  if (!capturing()) {
    room_.load()->before_capture(); // Nothing is in flight while a graph is captured.
  }
  inner_->beginAllocateToPool(device, pool, std::move(filter));
  std::lock_guard<std::mutex> lock(pools_mutex_);
  pools_.emplace_back(device, pool);
  captures_.store(pools_.size());
}

void LimitedCudaAllocator::endAllocateToPool(c10::DeviceIndex device, c10::MempoolId_t pool) {
  inner_->endAllocateToPool(device, pool);
  std::lock_guard<std::mutex> lock(pools_mutex_);
  // It may have begun while PyTorch's own allocator was in place.
  const auto found = std::find(pools_.begin(), pools_.end(), std::make_pair(device, pool));
  if (found != pools_.end()) {
    pools_.erase(found);
  }
  captures_.store(pools_.size());
}

} // namespace torch_lms
