#pragma once

#include <extension/memory/CountingCpuAllocator.h>
#include <extension/memory/Device.h>

namespace torch_lms {

/// Main memory, with files on a disk as the tier below. Never destroyed.
class CpuDevice final : public Device {
 public:
  explicit CpuDevice(std::shared_ptr<HostPool> pool);

  c10::Device device() const override {
    return c10::Device(c10::kCPU);
  }
  const std::shared_ptr<TransferBackend>& backend() const override {
    return backend_;
  }
  const std::shared_ptr<HostPool>& pool() const override {
    return pool_;
  }
  bool owns(const c10::DataPtr& data) const override;
  bool counts(const c10::DataPtr& data) const override {
    return data.get_deleter() == allocator_.raw_deleter();
  }
  int64_t current_stream() const override {
    return 0;
  }
  void note_current_stream() override {}
  void note_busy_streams() override {}
  c10::DataPtr allocate(size_t nbytes, int64_t stream) override;
  void keep_block_for_copy(void*) override {}
  void keep_block_for_arrival(void*) override {}
  FencePtr submitted_to(int64_t) override {
    return nullptr;
  }
  void keep_block_for_streams(void*) override {}
  DeviceUse use() const override;
  void reset_peak() override;
  bool has_contiguous(size_t) const override {
    return true; // blocks are mapped one by one
  }
  std::vector<std::vector<AllocatorBlock>> blocks() const override {
    return {};
  }
  /// What the machine and the control groups allow.
  static size_t memory_bytes();
  size_t total_bytes() const override {
    return memory_bytes();
  }
  void limit(size_t limit_bytes, Room& room) override;
  void unlimit() override;
  bool capturing() const override {
    return false;
  }

  /// Counts what tensors hold from now on, without a limit.
  void count() {
    allocator_.install();
  }

 private:
  const std::shared_ptr<HostPool> pool_;
  const std::shared_ptr<TransferBackend> backend_;
  CountingCpuAllocator& allocator_; // never destroyed: its blocks outlive everything
};

} // namespace torch_lms
