#pragma once

#include <atomic>
#include <mutex>

#include <entity/cuda/CudaTransferBackend.h>
#include <entity/cuda/PinnedSlabSource.h>
#include <extension/memory/Device.h>

namespace torch_lms {

/// One CUDA device, with pinned host memory as the tier below. Never destroyed.
class CudaDevice final : public Device {
 public:
  CudaDevice(c10::DeviceIndex index, std::shared_ptr<HostPool> pool);

  c10::Device device() const override {
    return c10::Device(c10::kCUDA, index_);
  }
  const std::shared_ptr<TransferBackend>& backend() const override {
    return backend_;
  }
  const std::shared_ptr<HostPool>& pool() const override {
    return pool_;
  }
  bool owns(const c10::DataPtr& data) const override;
  int64_t current_stream() const override;
  void note_current_stream() override;
  void note_busy_streams() override;
  c10::DataPtr allocate(size_t nbytes, int64_t stream) override;
  FencePtr submitted_to(int64_t stream) override;
  c10::DataPtr allocate_placeholder(size_t nbytes) override;
  void keep_block_for_copy(void* block) override;
  void keep_block_for_arrival(void* block) override;
  void keep_block_for_streams(void* block) override;
  DeviceUse use() const override;
  void reset_peak() override;
  bool has_contiguous(size_t nbytes) const override;
  std::vector<std::vector<AllocatorBlock>> blocks() const override;
  std::chrono::microseconds let_host_lead() override;
  std::shared_ptr<TimeMark> mark_time() override;
  size_t total_bytes() const override;
  void limit(size_t limit_bytes, Room& room) override;
  void unlimit() override;
  bool capturing() const override;

  /// PyTorch's allocator keeps blocks of up to so many bytes in segments of their own.
  static constexpr size_t kLargestSmallBlock = size_t{1} << 20;

  /// So many bytes have been allocated: see Note [Free memory that is known of]. Thread-safe;
  /// blocks on nothing.
  void note_taken(size_t nbytes) noexcept;

  /// The allocator's pool may grow beyond the limit while one of these lives.
  class BeyondLimit {
   public:
    explicit BeyondLimit(CudaDevice& device);
    ~BeyondLimit();
    BeyondLimit(const BeyondLimit&) = delete;
    BeyondLimit& operator=(const BeyondLimit&) = delete;

   private:
    CudaDevice& device_;
  };

 private:
  void keep_block_for(void* block, const std::vector<cudaStream_t>& streams) const;
  bool has_limit() const noexcept {
    return reserved_limit_bytes_.load() != SIZE_MAX;
  }
  /// Never more than the program itself has chosen.
  void set_fraction(size_t reserved_bytes) const;

  const c10::DeviceIndex index_;
  std::mutex beyond_mutex_; // of the number and what follows from it
  int beyond_limit_ = 0;
  std::atomic<size_t> reserved_limit_bytes_{SIZE_MAX};
  std::atomic<size_t> taken_bytes_{0}; // since the beginning
  mutable std::atomic<size_t> free_until_{0}; // so much has been taken
  mutable std::atomic<int64_t> given_back_{0}; // blocks until then
  double program_fraction_ = 1.0; // of the device's memory, as it was before the limit
  const std::shared_ptr<HostPool> pool_;
  const std::vector<cudaStream_t> pool_streams_;
  CudaTransferBackend* cuda_ = nullptr; // owned by backend_
  std::shared_ptr<TransferBackend> backend_;
};

} // namespace torch_lms
