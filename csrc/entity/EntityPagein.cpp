// The page-ins of EntityStorageImpl: what asks for one, its parts, and what calls it off.

#include <entity/EntityStorageImpl.h>

#include <utility>

namespace torch_lms {
namespace {

class Pin {
 public:
  explicit Pin(EntityStorageImpl& entity) : entity_(entity) {
    entity_.pin();
  }
  ~Pin() {
    entity_.unpin();
  }
  Pin(const Pin&) = delete;
  Pin& operator=(const Pin&) = delete;

 private:
  EntityStorageImpl& entity_;
};

} // namespace

bool EntityStorageImpl::request_pagein() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (state() != EntityState::kPagedOut || served_ != 0) {
    return false;
  }
  set_state(EntityState::kInQueued);
  return true;
}

bool EntityStorageImpl::cancel_pagein() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (state() != EntityState::kInQueued) {
    return false;
  }
  set_state(EntityState::kPagedOut);
  return true;
}

std::shared_ptr<PageinTransfer> EntityStorageImpl::begin_pagein() {
  Lock lock(mutex_);
  if (state() != EntityState::kInQueued) {
    return nullptr;
  }
  return submit_pagein_locked(lock);
}

std::shared_ptr<PageinTransfer> EntityStorageImpl::submit_pagein_locked(Lock& lock) {
  auto transfer = std::make_shared<PageinTransfer>();
  const void* host = host_;
  const std::shared_ptr<Recipe> recipe = recipe_;
  const bool was_served = was_served_;
  in_ = transfer;
  set_state(EntityState::kPagingIn);
  lock.unlock();
  try {
    if (recipe != nullptr) {
      transfer->block = recipe->make(&transfer->fence);
      binding_->keep_block_for_streams(*transfer->block);
    } else {
      auto block = binding_->allocate(nbytes_);
      binding_->keep_block_for_streams(*block);
      // Kernels on any stream may still use the host copy in place.
      const FencePtr after =
          was_served ? backend_->submitted_work() : binding_->block_is_free(*backend_);
      transfer->fence = backend_->copy_to_device(block->data(), host, nbytes_, after);
      transfer->block = std::move(block);
    }
  } catch (...) {
    lock.lock();
    transfer->submitted = true;
    transfer->failed = true;
    if (in_ == transfer) {
      in_ = nullptr;
      set_state(recipe != nullptr ? EntityState::kDropped : EntityState::kPagedOut);
    }
    submitted_.notify_all();
    throw;
  }
  lock.lock();
  transfer->submitted = true;
  submitted_.notify_all();
  return transfer;
}

bool EntityStorageImpl::commit_pagein(const std::shared_ptr<PageinTransfer>& transfer) {
  const KeepAlive keep = binding_->hold();
  Afterwards afterwards; // No stream of the program waits for the copy yet.
  Lock lock(mutex_);
  if (keep == nullptr || !commit_pagein_locked(transfer)) {
    return false;
  }
  const FencePtr copy = arrival_locked();
  afterwards.copy_writes_block = copy != nullptr;
  try {
    tell_allocator(lock, afterwards);
  } catch (...) {
    copy->wait(); // It is committed all the same, and there is nothing to tell any more.
  }
  return true;
}

/// Where it throws, the lock stays given up.
void EntityStorageImpl::tell_allocator(Lock& lock, const Afterwards& afterwards) {
  if (!afterwards.copy_reads_block && !afterwards.copy_writes_block) {
    return;
  }
  const Pin pin(*this); // The block stays while the lock is given up.
  lock.unlock();
  if (afterwards.copy_reads_block) {
    binding_->keep_block_for_copy();
  }
  if (afterwards.copy_writes_block) {
    binding_->keep_block_for_arrival();
  }
  lock.lock();
}

void EntityStorageImpl::abandon_pagein(const std::shared_ptr<PageinTransfer>& transfer) noexcept {
  std::unique_ptr<DeviceBlock> garbage; // destroyed after unlocking
  std::lock_guard<std::mutex> lock(mutex_);
  transfer->failed = true;
  garbage = std::move(transfer->block);
  if (in_ == transfer && !gone()) {
    in_ = nullptr;
    set_state(EntityState::kPagedOut);
  }
  submitted_.notify_all();
}

std::unique_ptr<DeviceBlock> EntityStorageImpl::cancel_arrival(
    const std::shared_ptr<PageinTransfer>& transfer) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (in_ != transfer || state() != EntityState::kPagingIn || !transfer->submitted ||
      transfer->failed) {
    return nullptr;
  }
  if (transfer->fence != nullptr && !transfer->fence->done()) {
    if (binding_->on_home_stream()) {
      backend_->order_after(transfer->fence);
    } else {
      transfer->fence->wait(); // The block's next owner is on another stream than the caller.
    }
  }
  in_ = nullptr;
  set_state(EntityState::kPagedOut);
  return std::move(transfer->block);
}

bool EntityStorageImpl::commit_pagein_locked(const std::shared_ptr<PageinTransfer>& transfer) {
  if (in_ != transfer || state() != EntityState::kPagingIn || transfer->failed ||
      gone_.load(std::memory_order_acquire)) {
    return false;
  }
  transfer->recipe = std::move(recipe_);
  recipe_ = nullptr;
  const bool keeps =
      transfer->recipe == nullptr && binding_->install_watched(std::move(transfer->block));
  if (transfer->recipe != nullptr) {
    binding_->unwatch();
    binding_->install_device(std::move(transfer->block));
  }
  in_ = nullptr;
  was_served_ = false;
  void* host = std::exchange(host_, nullptr);
  arrival_ = transfer->fence;
  set_state(EntityState::kResident);
  if (host == nullptr) {
    return true;
  }
  if (keeps) {
    kept_.store(host, std::memory_order_release);
  } else {
    backend_->free_host(host, transfer->fence);
  }
  return true;
}

AccessResult EntityStorageImpl::finish_pagein_locked(Lock& lock, Afterwards& afterwards) {
  const std::shared_ptr<PageinTransfer> transfer = in_;
  submitted_.wait(lock, [&] { return transfer->submitted; });
  if (gone_.load(std::memory_order_acquire)) {
    submitted_.wait(lock, [&] { return in_ != transfer; }); // until its release is over
  }
  if (!commit_pagein_locked(transfer)) {
    return access_locked(lock, afterwards); // it failed, or another thread was faster
  }
  afterwards.recipe = std::move(transfer->recipe);
  order_after_arrival_locked();
  return AccessResult::kPrefetched;
}

bool EntityStorageImpl::keeps_equal_copy() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (state() == EntityState::kResident && !replaced() && binding_->unwritten()) {
      return keeps_copy();
    }
  }
  release_copy();
  return false;
}

void EntityStorageImpl::stop_watching() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (state() != EntityState::kResident) {
      return;
    }
    if (!replaced()) { // else the storage is another entity's by now
      binding_->unwatch();
    }
  }
  release_copy();
}

void EntityStorageImpl::end_keeping(const std::function<bool()>& watched_again) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    // Who calls a page-out off stops watching when the copy is over, and not before.
    if (state() != EntityState::kResident || calling_off_) {
      return; // nothing is kept
    }
    settled_.store(false, std::memory_order_seq_cst); // see Note [Pins and requests]
    if (!pinned() && !replaced() && (watched_again == nullptr || !watched_again())) {
      binding_->unwatch();
    }
    refresh_settled();
  }
  release_copy();
}

bool EntityStorageImpl::retire() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (state() != EntityState::kResident || requesting_ || calling_off_) {
      return false;
    }
    if (!replaced()) {
      binding_->unwatch();
    }
    gone_.store(true, std::memory_order_release);
  }
  release_copy();
  return true;
}

} // namespace torch_lms
