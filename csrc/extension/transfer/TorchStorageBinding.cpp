#include <extension/transfer/TorchStorageBinding.h>

#include <atomic>
#include <new>
#include <utility>

#include <extension/base/Compat.h>
#include <extension/base/Fork.h>

namespace torch_lms {
namespace {

/// See Note [The mark of a paged-out storage].
struct HostMark {
  std::shared_ptr<EntityStorageImpl> entity;
  StorageEvents& events;
};

void release_host_mark(void* context) {
  auto* mark = static_cast<HostMark*>(context);
  if (in_forked_child()) {
    return; // The pool and its locks belong to the parent.
  }
  mark->events.released(mark->entity);
  delete mark;
}

// PyTorch passes its hook nothing but the storage.
std::atomic<StorageEvents*> listener{nullptr};

void on_raw_access(c10::StorageImpl* storage) {
  if (!in_forked_child()) {
    listener.load(std::memory_order_acquire)->raw_access(*storage);
  }
}

} // namespace

const char* why_not_movable(c10::StorageImpl& storage, const Device* device, bool watched) {
  if (device == nullptr) {
    return "it is on a device without paging (only cpu and cuda storages can be paged out)";
  }
  if (!watched && compat::has_materializer(storage)) {
    return "it is copy-on-write, or watched by someone else";
  }
  const c10::DataPtr& data = storage._mutable_data_ptr_no_checks();
  if (!device->owns(data)) {
    return "its memory does not belong to PyTorch's allocator for the device "
           "(numpy, shared, pinned, mapped or IPC memory, or copy-on-write)";
  }
  return nullptr;
}

TorchStorageBinding::TorchStorageBinding(
    c10::StorageImpl* storage,
    Device& device,
    StorageEvents& events)
    : storage_(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(storage)),
      device_(device),
      events_(events),
      home_stream_(device.current_stream()) {
  listener.store(&events, std::memory_order_release);
}

KeepAlive TorchStorageBinding::hold() {
  auto storage = storage_.lock();
  return storage ? std::make_shared<c10::Storage>(std::move(storage)) : nullptr;
}

KeepAlive TorchStorageBinding::acquire(size_t nbytes, void** device) {
  KeepAlive keep = hold();
  if (keep == nullptr) {
    return nullptr;
  }
  if (!has_bytes(*raw()) || raw()->nbytes() != nbytes ||
      (!unwritten() && !leaving() &&
       why_not_movable(*raw(), &device_, watching_ && compat::block_is_watched(*raw())) !=
           nullptr)) {
    unwatch(); // What replaces an entity's memory may leave the hook.
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
  auto block = std::make_unique<TorchDeviceBlock>(c10::DataPtr());
  auto mark = std::make_unique<HostMark>(HostMark{entity, events_});
  // Nothing below can fail.
  c10::DataPtr marked(host, mark.release(), &release_host_mark, data.device());
  compat::swap_data_ptr(*raw(), marked);
  std::swap(block->pointer(), marked);
  return block;
}

std::unique_ptr<DeviceBlock> TorchStorageBinding::allocate(size_t nbytes) {
  return std::make_unique<ArrivingBlock>(
      device_.allocate(nbytes, home_stream_), nbytes, events_.arriving_bytes());
}

void TorchStorageBinding::install_device(std::unique_ptr<DeviceBlock> block) {
  c10::DataPtr resident = std::move(static_cast<TorchDeviceBlock&>(*block).pointer());
  compat::swap_data_ptr(*raw(), resident);
  // The host copy is the entity's to free: only the mark goes.
  delete static_cast<HostMark*>(resident.release_context());
  if (refusing_) {
    compat::allow_access(*raw());
    refusing_ = false;
  }
}

bool TorchStorageBinding::exchange(std::unique_ptr<DeviceBlock>& block) {
  const c10::DataPtr& data = raw()->_mutable_data_ptr_no_checks();
  if ((watching_ && !compat::kHasMaterializer) || data.get() != block_ ||
      data.get_deleter() != block_deleter_) {
    return false;
  }
  compat::swap_data_ptr(*raw(), static_cast<TorchDeviceBlock&>(*block).pointer());
  if (watched_block_ == block_) {
    watched_block_ = data.get();
  }
  return true;
}

void TorchStorageBinding::refuse(const std::string& why) {
  raw()->release_data_and_set_meta_custom_data_ptr_error_msg_(why); // it releases nothing
  refusing_ = true;
}

bool TorchStorageBinding::install_watched(std::unique_ptr<DeviceBlock> block) {
  install_device(std::move(block));
  if (!events_.keeps_copies()) {
    unwatch();
    return false;
  }
  try {
    if (!compat::has_materializer(*raw())) { // else it has been watched since it went out
      compat::watch_block(*raw(), &on_raw_access);
    }
  } catch (const std::bad_alloc&) { // for a few bytes, before 2.13: the block is an ordinary one
    unwatch();
    return false;
  }
  watching_ = true;
  watched_block_ = raw()->_mutable_data_ptr_no_checks().get();
  return unwritten();
}

bool TorchStorageBinding::unwritten() {
  return watching_ && compat::block_is_watched(*raw()) &&
         raw()->_mutable_data_ptr_no_checks().get() == watched_block_;
}

/// Before 2.13 a block that is watched has an owner of which the allocator knows nothing, so it is
/// known by its address, which was looked at when the page-out was asked for.
bool TorchStorageBinding::leaving() {
  return !compat::kHasMaterializer && watching_ && compat::block_is_watched(*raw()) &&
         raw()->_mutable_data_ptr_no_checks().get() == block_;
}

void TorchStorageBinding::watch() {
  if (!compat::has_materializer(*raw())) {
    compat::watch_block(*raw(), &on_raw_access);
  }
  watching_ = true;
  // Before 2.13 that changes the block's owner, and back again where somebody may write to it: then
  // `install_host` does not find what it looks for, and the copy is thrown away.
  if (raw()->_mutable_data_ptr_no_checks().get() == block_) {
    block_deleter_ = raw()->_mutable_data_ptr_no_checks().get_deleter();
  }
}

void TorchStorageBinding::unwatch() {
  if (watching_ && compat::block_is_watched(*raw())) {
    compat::unwatch_block(*raw());
  }
  watching_ = false;
  watched_block_ = nullptr;
}

void TorchStorageBinding::keep_block_for_copy() {
  device_.keep_block_for_copy(raw()->_mutable_data_ptr_no_checks().get());
}

void TorchStorageBinding::keep_block_for_arrival() {
  device_.keep_block_for_arrival(raw()->_mutable_data_ptr_no_checks().get());
}

} // namespace torch_lms
