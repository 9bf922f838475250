#pragma once

#include <memory>

#include <entity/HostPool.h>
#include <entity/TransferBackend.h>

namespace torch_lms {

/// Copies on the calling thread between main memory and a host pool whose slabs
/// are memory-mapped files. Every fence has passed, and copies to the host stop
/// within 1 MiB of being cancelled.
class CpuTransferBackend final : public TransferBackend {
 public:
  explicit CpuTransferBackend(std::shared_ptr<HostPool> pool);

  bool copies_asynchronously() const noexcept override {
    return false;
  }
  void* allocate_host(size_t nbytes) override;
  void free_host(void* host, FencePtr after) noexcept override;
  FencePtr submitted_work() override;
  FencePtr copy_to_host(
      void* host,
      const void* device,
      size_t nbytes,
      const FencePtr& after,
      const std::atomic<bool>& cancelled) override;
  FencePtr copy_to_device(void* device, const void* host, size_t nbytes, const FencePtr& after)
      override;
  bool copy_on_device(void* to, const void* from, size_t nbytes) override;
  void order_after(const FencePtr& fence) override;

 private:
  const std::shared_ptr<HostPool> pool_;
};

} // namespace torch_lms
