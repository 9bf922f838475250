#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include <c10/core/Allocator.h>
#include <c10/core/impl/EntityStorageImpl.h>
#include <c10/core/impl/StorageBinding.h>
#include <c10/core/impl/SwapDevice.h>

namespace c10 {
namespace impl {

/// The device memory of a storage while its pager has it: what the core sees in place of
/// a storage. See Note [A pager knows no storage] in c10/core/StoragePager.h.
///
/// The memory is guarded by the entity's mutex while a transfer is under way, and by the
/// pager's otherwise.
class ParkedMemory final : public torch_lms::StorageBinding {
 public:
  ParkedMemory(SwapDevice& device, size_t nbytes)
      : device_(device), nbytes_(nbytes), home_stream_(device.current_stream()) {}

  // For the pager.
  void park(DataPtr&& data) {
    data_ = std::move(data);
  }
  DataPtr take() {
    return std::exchange(data_, DataPtr(nullptr, data_.device()));
  }
  bool parked() const {
    return data_.get() != nullptr;
  }
  int64_t home_stream() const noexcept {
    return home_stream_;
  }
  /// The storage is gone.
  void expire() noexcept {
    expired_.store(true, std::memory_order_release);
  }
  /// Whether the next page-in is one that an access has to do. For counting.
  void set_passive(bool passive) noexcept {
    passive_.store(passive, std::memory_order_relaxed);
  }
  /// The bytes are no longer on the host: back, or gone. For counting.
  bool leave_host() noexcept;

  // For the entity. A storage that dies calls its transfers off, so nothing has to keep it
  // alive: queues hold weak references, in effect.
  torch_lms::KeepAlive hold() override {
    return expired() ? nullptr : torch_lms::KeepAlive(torch_lms::KeepAlive(), this);
  }
  torch_lms::KeepAlive acquire(size_t, void** device) override {
    *device = data_.get();
    return parked() ? hold() : nullptr;
  }
  bool expired() override {
    return expired_.load(std::memory_order_acquire);
  }
  const void* address() override {
    return data_.get();
  }
  bool referenced() override {
    return !expired();
  }
  std::unique_ptr<torch_lms::DeviceBlock> install_host(
      void* host,
      const std::shared_ptr<torch_lms::EntityStorageImpl>& entity) override;
  std::unique_ptr<torch_lms::DeviceBlock> allocate(size_t nbytes) override;
  void install_device(std::unique_ptr<torch_lms::DeviceBlock> block) override;
  void watch() override {}
  void unwatch() override {}
  void keep_block_for_copy() override {
    device_.keep_block_for_copy(data_);
  }
  void keep_block_for_arrival() override {
    device_.keep_block_for_arrival(data_);
  }
  bool on_home_stream() override {
    return device_.current_stream() == home_stream_;
  }

 private:
  SwapDevice& device_;
  const size_t nbytes_;
  const int64_t home_stream_;
  DataPtr data_;
  std::atomic<bool> expired_{false};
  std::atomic<bool> on_host_{false};
  std::atomic<bool> passive_{false};
};

} // namespace impl
} // namespace c10
