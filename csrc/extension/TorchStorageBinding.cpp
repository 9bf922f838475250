#include <extension/TorchStorageBinding.h>

#include <utility>

#include <extension/Compat.h>
#include <extension/Fork.h>
#include <extension/Pager.h>

namespace torch_lms {
namespace {

class TorchDeviceBlock final : public DeviceBlock {
 public:
  explicit TorchDeviceBlock(c10::DataPtr data) : data_(std::move(data)) {}
  void* data() const noexcept override {
    return data_.get();
  }
  c10::DataPtr take() {
    return std::move(data_);
  }

 private:
  c10::DataPtr data_;
};

/// Raw mutable access to a watched storage: see layer 3 in README.md.
void materialize(c10::StorageImpl* storage) {
  Pager::get().raw_access(storage);
}

} // namespace

void release_host_mark(void* context) {
  auto* mark = static_cast<HostMark*>(context);
  if (in_forked_child()) {
    return; // The pool and its locks belong to the parent.
  }
  Pager::get().storage_released(mark->entity);
  delete mark;
}

const char* why_not_movable(c10::StorageImpl& storage, const Device* device) {
  if (device == nullptr) {
    return "it is on a device without paging (only cpu and cuda storages can be paged out)";
  }
  if (compat::has_materializer(storage)) {
    return "it is copy-on-write, or watched by someone else";
  }
  const c10::DataPtr& data = storage._mutable_data_ptr_no_checks();
  if (!device->owns(data)) {
    return "its memory does not belong to PyTorch's allocator for the device "
           "(numpy, shared, pinned, mapped or IPC memory, or copy-on-write)";
  }
  return nullptr;
}

TorchStorageBinding::TorchStorageBinding(c10::StorageImpl* storage, Device& device)
    : storage_(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(storage)),
      device_(device),
      home_stream_(device.current_stream()) {}

KeepAlive TorchStorageBinding::hold() {
  auto storage = storage_.lock();
  return storage ? std::make_shared<c10::Storage>(std::move(storage)) : nullptr;
}

KeepAlive TorchStorageBinding::acquire(size_t nbytes, void** device) {
  KeepAlive keep = hold();
  if (keep == nullptr || raw()->nbytes() != nbytes || host_mark(*raw()) != nullptr ||
      why_not_movable(*raw(), &device_) != nullptr) {
    return nullptr;
  }
  const c10::DataPtr& data = raw()->_mutable_data_ptr_no_checks();
  block_ = *device = data.get();
  block_deleter_ = data.get_deleter();
  return keep;
}

std::unique_ptr<DeviceBlock> TorchStorageBinding::install_host(
    void* host,
    const std::shared_ptr<EntityStorageImpl>& entity) {
  c10::DataPtr& data = raw()->_mutable_data_ptr_no_checks();
  if (data.get() != block_ || data.get_deleter() != block_deleter_ ||
      raw()->nbytes() != entity->nbytes()) {
    return nullptr;
  }
  auto mark = std::make_unique<HostMark>(HostMark{entity});
  c10::DataPtr marked(host, mark.get(), &release_host_mark, data.device());
  auto block = std::make_unique<TorchDeviceBlock>(c10::DataPtr());
  mark.release();
  // Nothing below can fail.
  std::swap(data, marked);
  *block = TorchDeviceBlock(std::move(marked));
  return block;
}

std::unique_ptr<DeviceBlock> TorchStorageBinding::allocate(size_t nbytes) {
  return std::make_unique<TorchDeviceBlock>(device_.allocate(nbytes, home_stream_));
}

void TorchStorageBinding::install_device(std::unique_ptr<DeviceBlock>& block) {
  c10::DataPtr& data = raw()->_mutable_data_ptr_no_checks();
  c10::DataPtr resident = static_cast<TorchDeviceBlock&>(*block).take();
  std::swap(data, resident);
  // The host copy is the entity's to free: only the mark goes.
  delete static_cast<HostMark*>(resident.release_context());
}

void TorchStorageBinding::watch() {
  compat::set_materializer(*raw(), &materialize);
}

void TorchStorageBinding::unwatch() {
  compat::clear_materializer(*raw());
}

void TorchStorageBinding::keep_block_for_copy() {
  device_.keep_block_for_copy(raw()->_mutable_data_ptr_no_checks());
}

void TorchStorageBinding::keep_block_for_arrival() {
  device_.keep_block_for_arrival(raw()->_mutable_data_ptr_no_checks());
}

} // namespace torch_lms
