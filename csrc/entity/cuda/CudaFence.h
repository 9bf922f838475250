#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <vector>

#include <cuda_runtime_api.h>

#include <entity/TransferBackend.h>

namespace torch_lms {

/// Note [Small copies share a fence]
/// An event between two copies holds the second one up, which is felt where copies are
/// small. So those on one stream share a fence until they are many bytes, or until
/// somebody asks for it: its event is recorded then, behind all that have been submitted.

/// Work on one CUDA device: what had been submitted to some streams when their events were
/// recorded, or the copies on one stream that it covers.
///
/// Thread-safe, but for `record`: that is for the thread that makes the fence.
class CudaFence final : public Fence {
 public:
  /// `open_on`: the stream of the copies that it is going to cover. `number`: see Note
  /// [Streams that nobody has noted]; 0 for one that is not behind submitted work.
  explicit CudaFence(int device, cudaStream_t open_on = nullptr, uint64_t number = 0);
  ~CudaFence() override;
  CudaFence(const CudaFence&) = delete;
  CudaFence& operator=(const CudaFence&) = delete;

  /// Covers what has been submitted to the stream. The device has to be current.
  void record(cudaStream_t stream);

  /// Calls `submit`, whose copy this fence covers then. False if it is closed by now.
  template <typename Submit>
  bool cover(const Submit& submit) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!open_) {
      return false;
    }
    submit();
    return true;
  }

  /// From now on nothing more is covered. Throws TransferFailed.
  void close();

  bool done() noexcept override;
  void wait() override;

  /// Lets the stream wait. Throws TransferFailed.
  void order(cudaStream_t stream);

  uint64_t number() const noexcept {
    return number_;
  }

 private:
  const int device_;
  const uint64_t number_;
  const cudaStream_t open_on_;
  std::mutex mutex_; // held while a copy is covered
  std::atomic<bool> open_;
  std::vector<cudaEvent_t> events_;
};

} // namespace torch_lms
