#include <cstdlib>
#include <cstring>
#include <memory>

#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/CpuTransferBackend.h>
#include <c10/core/impl/HostMemory.h>
#include <c10/core/impl/HostPool.h>
#include <c10/core/impl/SwapDevice.h>

namespace c10 {
namespace impl {
namespace {

constexpr size_t kSlabBytes = size_t{64} << 20;

/// Main memory, paged out to files: no use in practice, but everything above the backend
/// can be tested without a GPU.
class CpuSwapDevice final : public SwapDevice {
 public:
  CpuSwapDevice()
      : pool_(make_pool()), backend_(std::make_shared<torch_lms::CpuTransferBackend>(pool_)) {}

  Device device() const override {
    return Device(DeviceType::CPU);
  }
  const std::shared_ptr<torch_lms::TransferBackend>& backend() const override {
    return backend_;
  }
  bool owns(const DataPtr& data) const override {
    // Allocators of other libraries have other deleters, as have blocks with a C++
    // object in them, which must not move.
    const DeleterFnPtr deleter = GetCPUAllocator()->raw_deleter();
    return data.get() != nullptr && data.get() == data.get_context() && deleter != nullptr &&
           data.get_deleter() == deleter;
  }
  int64_t current_stream() const override {
    return 0;
  }
  void note_streams_in_use() override {}
  void note_current_stream() override {}
  void note_use(const DataPtr&, int64_t) override {}
  DataPtr allocate(size_t nbytes, int64_t) override {
    return GetCPUAllocator()->allocate(nbytes);
  }
  void keep_block_for_copy(const DataPtr&) override {}
  void keep_block_for_arrival(const DataPtr&) override {}
  bool capturing() const override {
    return false;
  }
  void set_host_limit(size_t limit_bytes) override {
    pool_->set_limit(limit_bytes != 0 ? limit_bytes : torch_lms::default_host_limit_bytes());
  }
  torch_lms::HostPool& host_pool() const override {
    return *pool_;
  }

 private:
  static std::shared_ptr<torch_lms::HostPool> make_pool() {
    const char* directory = std::getenv("TMPDIR");
    return std::make_shared<torch_lms::HostPool>(
        std::make_unique<torch_lms::FileSlabSource>(
            directory != nullptr && *directory != '\0' ? directory : "/tmp", kSlabBytes),
        torch_lms::HostPoolOptions());
  }

  const std::shared_ptr<torch_lms::HostPool> pool_;
  const std::shared_ptr<torch_lms::TransferBackend> backend_;
};

bool cpu_paging_asked_for() {
  const char* flag = std::getenv("TORCH_SWAP_CPU");
  return flag != nullptr && std::strcmp(flag, "1") == 0;
}

const bool registered = [] {
  if (cpu_paging_asked_for()) {
    SwapDeviceType devices;
    devices.make = [](DeviceIndex) -> SwapDevice* { return new CpuSwapDevice(); };
    register_swap_devices(DeviceType::CPU, devices);
  }
  return true;
}();

} // namespace
} // namespace impl
} // namespace c10
