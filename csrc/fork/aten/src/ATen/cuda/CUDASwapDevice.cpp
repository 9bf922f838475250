#include <memory>
#include <set>
#include <utility>
#include <vector>

#include <ATen/cuda/CudaScope.h>
#include <ATen/cuda/CudaTransferBackend.h>
#include <ATen/cuda/PinnedSlabSource.h>
#include <c10/core/impl/Error.h>
#include <c10/core/impl/HostMemory.h>
#include <c10/core/impl/HostPool.h>
#include <c10/core/impl/SwapDevice.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

namespace at {
namespace cuda {
namespace {

namespace allocator = c10::cuda::CUDACachingAllocator;

constexpr size_t kSlabBytes = size_t{1} << 30;

/// Host memory that all CUDA devices share.
const std::shared_ptr<torch_lms::HostPool>& pinned_pool() {
  static const auto* pool =
      new std::shared_ptr<torch_lms::HostPool>(std::make_shared<torch_lms::HostPool>(
          std::make_unique<torch_lms::PinnedSlabSource>(kSlabBytes), torch_lms::HostPoolOptions()));
  return *pool;
}

/// Every stream that PyTorch hands out for a device. There is no list of them, but they are
/// handed out in turn: once round gives all, and leaves the turn where it was.
std::vector<cudaStream_t> pool_streams(DeviceIndex device) {
  std::set<cudaStream_t> streams;
  for (const bool high_priority : {false, true}) {
    while (streams.insert(c10::cuda::getStreamFromPool(high_priority, device).stream()).second) {
    }
  }
  return std::vector<cudaStream_t>(streams.begin(), streams.end());
}

class CudaSwapDevice final : public c10::impl::SwapDevice {
 public:
  explicit CudaSwapDevice(DeviceIndex index)
      : index_(index),
        pool_streams_(pool_streams(index)),
        cuda_(
            std::make_shared<torch_lms::CudaTransferBackend>(
                index,
                pinned_pool(),
                [index] { return c10::cuda::getCurrentCUDAStream(index).stream(); },
                pool_streams_)),
        backend_(cuda_) {}

  Device device() const override {
    return Device(DeviceType::CUDA, index_);
  }
  const std::shared_ptr<torch_lms::TransferBackend>& backend() const override {
    return backend_;
  }

  bool owns(const DataPtr& data) const override {
    // Uncached allocations, IPC memory and tensors of other libraries have other deleters.
    return data.get() != nullptr && data.get() == data.get_context() &&
           data.get_deleter() == &allocator::raw_delete;
  }

  int64_t current_stream() const override {
    return c10::cuda::getCurrentCUDAStream(index_).id();
  }

  // Note [All streams that used a storage]
  // Before a storage is paged out for the first time nobody has noted who uses it, and its
  // users need not be the current stream. So copies are ordered after all work on the
  // device: that on the default stream, the current one and those noted before as of the
  // request, that on others of PyTorch as of when the worker begins to copy: see Note
  // [Streams that nobody has noted]. Not seen are streams that PyTorch did not make, unless
  // they are current.
  void note_streams_in_use() override {
    cuda_->note_stream(nullptr);
    note_current_stream();
  }

  void note_current_stream() override {
    cuda_->note_stream(c10::cuda::getCurrentCUDAStream(index_).stream());
  }

  void note_use(const DataPtr& data, int64_t home) override {
    const auto current = c10::cuda::getCurrentCUDAStream(index_);
    if (current.id() != home) {
      allocator::recordStream(data, current);
    }
  }

  DataPtr allocate(size_t nbytes, int64_t stream) override {
    const c10::cuda::CUDAStream home(c10::Stream(c10::Stream::UNSAFE, device(), stream));
    const c10::cuda::CUDAStreamGuard guard(home);
    DataPtr data = allocate_here(nbytes);
    // What record_stream told of the old block is lost: assume every stream in use.
    for (cudaStream_t used : cuda_->noted_streams()) {
      if (used != home.stream()) {
        record(data, used);
      }
    }
    return data;
  }

  void keep_block_for_copy(const DataPtr& data) override {
    record(data, cuda_->pageout_stream());
  }

  void keep_block_for_arrival(const DataPtr& data) override {
    record(data, cuda_->pagein_stream());
  }

  bool capturing() const override {
    if (torch_lms::is_capturing(c10::cuda::getCurrentCUDAStream(index_).stream())) {
      return true;
    }
    for (cudaStream_t stream : pool_streams_) {
      if (torch_lms::is_capturing(stream)) {
        return true;
      }
    }
    return false;
  }

  bool capturing_in_use() override {
    note_current_stream();
    return cuda_->captures_on_noted();
  }

  int64_t allocated_bytes() const override {
    const auto all = static_cast<size_t>(allocator::StatType::AGGREGATE);
    return allocator::getDeviceStats(index_).allocated_bytes[all].current;
  }

  void set_host_limit(size_t limit_bytes) override {
    pinned_pool()->set_limit(
        limit_bytes != 0 ? limit_bytes : torch_lms::default_host_limit_bytes());
  }

  torch_lms::HostPool& host_pool() const override {
    return *pinned_pool();
  }

 private:
  static DataPtr allocate_here(size_t nbytes) {
    if (!c10::impl::on_swap_worker()) {
      return allocator::get()->allocate(nbytes);
    }
    try {
      return allocator::get()->allocate(nbytes);
    } catch (const c10::Error& error) {
      // A prefetch; the access that needs the bytes will try, and raise, by itself.
      throw torch_lms::NoRoom(error.what_without_backtrace());
    }
  }

  void record(const DataPtr& data, cudaStream_t stream) const {
    const auto used = stream == nullptr ? c10::cuda::getDefaultCUDAStream(index_)
                                        : c10::cuda::getStreamFromExternal(stream, index_);
    allocator::recordStream(data, used);
  }

  const DeviceIndex index_;
  const std::vector<cudaStream_t> pool_streams_;
  const std::shared_ptr<torch_lms::CudaTransferBackend> cuda_;
  const std::shared_ptr<torch_lms::TransferBackend> backend_;
};

void prepare_worker() {
  // A capture on another thread must not forbid a worker's calls, which touch only streams
  // that are never captured.
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  cudaThreadExchangeStreamCaptureMode(&mode);
}

const bool registered = [] {
  c10::impl::SwapDeviceType devices;
  devices.make = [](DeviceIndex index) -> c10::impl::SwapDevice* {
    return new CudaSwapDevice(index);
  };
  devices.prepare_worker = &prepare_worker;
  c10::impl::register_swap_devices(DeviceType::CUDA, devices);
  return true;
}();

} // namespace
} // namespace cuda
} // namespace at
