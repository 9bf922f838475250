// The page-outs of EntityStorageImpl: what asks for one, its parts, and what calls it off.

#include <entity/EntityStorageImpl.h>

#include <algorithm>
#include <utility>

namespace torch_lms {

bool EntityStorageImpl::request_pageout(uint64_t known_since) {
  const std::shared_ptr<PageoutTransfer> transfer = begin_request();
  if (transfer == nullptr) {
    return false;
  }
  try {
    transfer->earlier.tick = std::max(first_seen_, known_since);
    transfer->doubtful = transfer->earlier.running();
    if (!transfer->doubtful) {
      transfer->after = backend_->submitted_work();
    }
  } catch (...) {
    abandon_request();
    throw;
  }
  return finish_request(transfer);
}

std::shared_ptr<PageoutTransfer> EntityStorageImpl::begin_request() {
  auto transfer = std::make_shared<PageoutTransfer>();
  const KeepAlive alive = binding_->hold(); // so that `acquire` never lets go of the last
  ReleasedCopy stale; // as the caller has found it, or there is none
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stale = take_copy_locked(); // in one with the request: it may have gone and come since
    if (state() != EntityState::kResident || requesting_ || calling_off_ || pinned() || gone()) {
      return nullptr;
    }
    transfer->earlier = EarlierOps{first_seen_, OpClock::this_thread()};
    transfer->accesses = accesses_;
    transfer->pins = pins_ever();
    order_after_arrival_locked(); // a prefetch that nobody has used yet
    void* device = nullptr;
    // Under the lock: another thread may be in `stop_watching`.
    transfer->keep = binding_->acquire(nbytes_, &device);
    transfer->device = device;
    if (transfer->keep == nullptr) { // The storage no longer holds the entity's memory.
      gone_.store(true, std::memory_order_release);
      return nullptr;
    }
    requesting_ = true;
  }
  return transfer;
}

bool EntityStorageImpl::finish_request(const std::shared_ptr<PageoutTransfer>& transfer) {
  std::lock_guard<std::mutex> lock(mutex_);
  requesting_ = false;
  // An access since the fence was taken would not be covered by it.
  if (state() != EntityState::kResident || transfer->accesses != accesses_) {
    return false;
  }
  set_state(EntityState::kOutQueued);
  if (pinned() || transfer->pins != pins_ever()) { // see Note [Pins and requests]
    set_state(EntityState::kResident);
    return false;
  }
  try {
    binding_->watch();
  } catch (...) { // for want of a few bytes
    set_state(EntityState::kResident);
    throw;
  }
  out_ = transfer;
  return true;
}

void EntityStorageImpl::abandon_request() noexcept {
  std::lock_guard<std::mutex> lock(mutex_);
  requesting_ = false;
}

bool EntityStorageImpl::pageout_must_wait() {
  std::lock_guard<std::mutex> lock(mutex_);
  return state() == EntityState::kOutQueued && out_->doubtful && out_->earlier.running();
}

bool EntityStorageImpl::begin_pageout(std::shared_ptr<PageoutTransfer>* started) {
  std::shared_ptr<PageoutTransfer> transfer;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (state() != EntityState::kOutQueued) {
      return false;
    }
    *started = transfer = out_;
    if (unreferenced_locked() || replaced_since_request_locked(*transfer)) {
      return false;
    }
    set_state(EntityState::kPagingOut);
  }
  try {
    if (transfer->doubtful) {
      transfer->after = backend_->submitted_work();
    }
    transfer->host = backend_->allocate_host(nbytes_); // may be slow
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (out_ != transfer) {
        return true; // Cancelled meanwhile; `commit_pageout` frees the host memory.
      }
      transfer->copying = true;
    }
    transfer->fence = backend_->copy_to_host(
        transfer->host, transfer->device, nbytes_, transfer->after, transfer->cancelled);
  } catch (...) {
    abandon_pageout(transfer);
    throw;
  }
  std::lock_guard<std::mutex> lock(mutex_);
  transfer->copying = false;
  submitted_.notify_all();
  return true;
}

bool EntityStorageImpl::is_leaving() {
  const auto is_going = [&] {
    return state() == EntityState::kOutQueued || state() == EntityState::kPagingOut;
  };
  if (unreferenced_.load(std::memory_order_acquire)) {
    return !binding_->expired();
  }
  if (!is_going()) {
    return false;
  }
  std::lock_guard<std::mutex> lock(mutex_);
  return is_going() && out_ != nullptr && !binding_->referenced();
}

/// Nobody will use the bytes again: there is nothing to move.
bool EntityStorageImpl::unreferenced_locked() {
  if (binding_->referenced()) {
    return false;
  }
  out_ = nullptr;
  gone_.store(true, std::memory_order_release);
  unreferenced_.store(true, std::memory_order_release);
  set_state(EntityState::kResident);
  return true;
}

/// An op that had not pinned the entity may have given the storage other memory since (Note [Who
/// may still use a storage]). Such ops are over, and who comes now calls the page-out off.
bool EntityStorageImpl::replaced_since_request_locked(const PageoutTransfer& transfer) {
  if (!transfer.doubtful) {
    return false;
  }
  void* device = nullptr;
  const KeepAlive keep = binding_->acquire(nbytes_, &device); // the transfer has another
  if (keep != nullptr && device == transfer.device) {
    return false;
  }
  out_ = nullptr;
  binding_->unwatch();
  gone_.store(true, std::memory_order_release);
  set_state(EntityState::kResident);
  return true;
}

void EntityStorageImpl::abandon_pageout(const std::shared_ptr<PageoutTransfer>& transfer) noexcept {
  void* host = nullptr;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    transfer->copying = false;
    std::swap(host, transfer->host);
    if (out_ == transfer) {
      out_ = nullptr;
      binding_->unwatch();
      set_state(EntityState::kResident);
    }
    submitted_.notify_all();
  }
  if (host != nullptr) {
    backend_->free_host(host, transfer->fence);
  }
}

CommitResult EntityStorageImpl::commit_pageout(
    const std::shared_ptr<PageoutTransfer>& transfer,
    std::unique_ptr<DeviceBlock>* garbage) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (out_ == transfer) {
      if (pinned()) {
        return CommitResult::kInUse;
      }
      if (binding_->referenced()) {
        *garbage = binding_->install_host(transfer->host, shared_from_this()); // may throw
      }
      out_ = nullptr;
      if (*garbage != nullptr) {
        host_ = std::exchange(transfer->host, nullptr);
        set_state(EntityState::kPagedOut);
        return CommitResult::kCommitted;
      }
      binding_->unwatch();
      gone_.store(true, std::memory_order_release);
      set_state(EntityState::kResident);
    }
  }
  backend_->free_host(transfer->host, transfer->fence);
  transfer->host = nullptr;
  return CommitResult::kDropped;
}

AccessResult EntityStorageImpl::cancel_pageout_locked(Lock& lock, Afterwards& afterwards) {
  std::shared_ptr<PageoutTransfer> transfer = std::move(out_);
  out_ = nullptr;
  calling_off_ = true; // before the state: nobody may take it for settled
  set_state(EntityState::kResident);
  // The caller, and any other that finds the entity resident, may free or rewrite the
  // block as soon as its access returns, so a copy on the worker's own thread has to be
  // over, and a submitted one must keep the block mapped.
  transfer->cancelled.store(true, std::memory_order_release);
  submitted_.wait(lock, [&] { return !transfer->copying; });
  calling_off_ = false;
  binding_->unwatch(); // not before: an access that nobody watches for would not wait
  refresh_settled();
  submitted_.notify_all(); // they go on when the lock is free
  afterwards.copy_reads_block = transfer->fence != nullptr && !transfer->fence->done();
  return AccessResult::kCancelledPageout;
}

} // namespace torch_lms
