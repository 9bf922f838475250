#pragma once

#include <memory>

#include <c10/core/Storage.h>
#include <c10/core/StorageImpl.h>
#include <entity/EntityStorageImpl.h>
#include <entity/StorageBinding.h>

#include <extension/Device.h>

namespace torch_lms {

/// Note [The mark of a paged-out storage]
/// The `DataPtr` of a paged-out storage points at the host copy, keeps the
/// storage's own device, and has `release_host_mark` as its deleter: comparing
/// the deleter tells a paged-out storage from any other, and the context leads to
/// its entity. An access that nothing intercepts therefore reads and writes the
/// host copy, which is slow and right, and a storage that dies or is resized while
/// it is paged out tells its entity so by running the deleter.
struct HostMark {
  std::shared_ptr<EntityStorageImpl> entity;
};

void release_host_mark(void* mark);

/// The mark of a paged-out storage; null if the storage is not paged out.
inline HostMark* host_mark(c10::StorageImpl& storage) {
  const c10::DataPtr& data = storage._mutable_data_ptr_no_checks();
  return data.get_deleter() == &release_host_mark ? static_cast<HostMark*>(data.get_context())
                                                  : nullptr;
}

/// Why a storage cannot be paged out; null if it can. Not for paged-out storages.
const char* why_not_movable(c10::StorageImpl& storage, const Device* device);

/// Binds an entity to a `c10::StorageImpl`, which it holds weakly.
class TorchStorageBinding final : public StorageBinding {
 public:
  TorchStorageBinding(c10::StorageImpl* storage, Device& device);

  KeepAlive hold() override;
  KeepAlive acquire(size_t nbytes, void** device) override;
  const void* address() override {
    return raw()->_mutable_data_ptr_no_checks().get();
  }
  bool expired() override {
    return storage_.expired();
  }
  bool referenced() override {
    return storage_.use_count() > 1;
  }
  std::unique_ptr<DeviceBlock> install_host(
      void* host,
      const std::shared_ptr<EntityStorageImpl>& entity) override;
  std::unique_ptr<DeviceBlock> allocate(size_t nbytes) override;
  void install_device(std::unique_ptr<DeviceBlock>& block) override;
  void watch() override;
  void unwatch() override;
  void keep_block_for_copy() override;
  void keep_block_for_arrival() override;
  bool on_home_stream() override {
    return device_.current_stream() == home_stream_;
  }

 private:
  c10::StorageImpl* raw() {
    return storage_._unsafe_get_target();
  }

  c10::weak_intrusive_ptr<c10::StorageImpl> storage_;
  Device& device_;
  const int64_t home_stream_;
  const void* block_ = nullptr;
  c10::DeleterFnPtr block_deleter_ = nullptr;
};

} // namespace torch_lms
