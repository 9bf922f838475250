#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <utility>

#include <c10/core/Storage.h>
#include <c10/core/StorageImpl.h>
#include <entity/EntityStorageImpl.h>
#include <entity/StorageBinding.h>

#include <extension/memory/Device.h>

namespace torch_lms {

/// What happens to a storage outside of the parts that move it.
class StorageEvents {
 public:
  virtual ~StorageEvents() = default;

  /// Raw mutable access to a watched storage is about to happen. Called with no lock held.
  virtual void raw_access(c10::StorageImpl& storage) = 0;

  /// Where device blocks are counted that no storage has yet.
  virtual std::atomic<int64_t>& arriving_bytes() noexcept = 0;

  /// Whether the host is to keep its copies of bytes that come in, while nobody writes them.
  virtual bool keeps_copies() const noexcept = 0;

  /// A paged-out storage died or was given other memory. Called with whatever locks who frees
  /// storages holds.
  virtual void released(const std::shared_ptr<EntityStorageImpl>& entity) noexcept = 0;
};

/// Note [The mark of a paged-out storage]
/// The `DataPtr` of a paged-out storage points at the host copy, keeps the
/// storage's own device, and has a deleter of ours that leads to the entity. An access that
/// nothing intercepts therefore reads and writes the host copy, which is slow and right, and a
/// storage that dies or is resized while it is paged out tells its entity so by running the
/// deleter.
///
/// Note [Watched blocks]
/// Whether the bytes of a resident storage have been written since they came in is known from
/// what PyTorch does for its own copy-on-write storages: whoever asks for a mutable pointer, in
/// an op's kernel or in any other extension, goes through a hook. From 2.13 on the hook is a
/// function of ours (`Compat.h`). Before, the block is handed to the storage as a
/// copy-on-write block with one owner, which PyTorch makes an ordinary block at the first
/// mutable access: if it is still one, nobody can have written. Such a block's stream uses are
/// not recorded by PyTorch's allocator, so all streams that have been noted are when it is freed.
///
/// A block that is on its way out is watched, too: who asks for a mutable pointer may write after
/// the bytes have been copied. From 2.13 on the hook calls the page-out off. Before, the commit
/// finds another block than the one that has been copied (`install_host`), and drops the copy.

/// Why a storage cannot be paged out; null if it can. Not for paged-out storages. `watched`: its
/// entity watches it.
const char* why_not_movable(c10::StorageImpl& storage, const Device* device, bool watched = false);

/// Whether the storage's size is a number: storages of graphs that are being traced may have
/// a symbol instead, and no bytes.
inline bool has_bytes(const c10::StorageImpl& storage) {
  return !storage.sym_nbytes().is_heap_allocated();
}
/// As many as it has; 0 for a symbol.
inline size_t bytes_of(const c10::StorageImpl& storage) {
  const c10::SymInt nbytes = storage.sym_nbytes();
  return nbytes.is_heap_allocated() ? 0 : static_cast<size_t>(nbytes.as_int_unchecked());
}

/// A block of PyTorch's.
class TorchDeviceBlock : public DeviceBlock {
 public:
  explicit TorchDeviceBlock(c10::DataPtr data) : data_(std::move(data)) {}
  void* data() const noexcept override {
    return data_.get();
  }
  c10::DataPtr& pointer() {
    return data_;
  }

 private:
  c10::DataPtr data_;
};

/// One that a storage is to get.
class ArrivingBlock final : public TorchDeviceBlock {
 public:
  ArrivingBlock(c10::DataPtr data, size_t nbytes, std::atomic<int64_t>& counted)
      : TorchDeviceBlock(std::move(data)),
        nbytes_(static_cast<int64_t>(nbytes)),
        counted_(counted) {
    counted_.fetch_add(nbytes_, std::memory_order_relaxed);
  }
  ~ArrivingBlock() override {
    counted_.fetch_sub(nbytes_, std::memory_order_relaxed);
  }
  ArrivingBlock(const ArrivingBlock&) = delete;
  ArrivingBlock& operator=(const ArrivingBlock&) = delete;

 private:
  const int64_t nbytes_;
  std::atomic<int64_t>& counted_;
};

/// Binds an entity to a `c10::StorageImpl`, which it holds weakly.
class TorchStorageBinding final : public StorageBinding {
 public:
  TorchStorageBinding(c10::StorageImpl* storage, Device& device, StorageEvents& events);

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
  /// Only the home stream may be at work on it: before the allocator hands a block out again, it
  /// waits for the others that it has been told of.
  FencePtr block_is_free(TransferBackend& /*backend*/) override {
    return device_.submitted_to(home_stream_);
  }
  void keep_block_for_streams(const DeviceBlock& block) override {
    device_.keep_block_for_streams(block.data());
  }
  void install_device(std::unique_ptr<DeviceBlock> block) override;
  bool exchange(std::unique_ptr<DeviceBlock>& block) override;
  void refuse(const std::string& why) override;
  bool install_watched(std::unique_ptr<DeviceBlock> block) override;
  bool unwritten() override;
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
  bool leaving();

  c10::weak_intrusive_ptr<c10::StorageImpl> storage_;
  Device& device_;
  StorageEvents& events_;
  const int64_t home_stream_;
  bool watching_ = false;
  bool refusing_ = false;
  const void* watched_block_ = nullptr; // since it came in
  const void* block_ = nullptr;
  c10::DeleterFnPtr block_deleter_ = nullptr;
};

} // namespace torch_lms
