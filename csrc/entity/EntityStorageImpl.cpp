#include <entity/EntityStorageImpl.h>

#include <algorithm>
#include <new>
#include <utility>

namespace torch_lms {
namespace {

// Allocators hand out the smallest block that fits, and those that do not suit are held meanwhile.
constexpr size_t kMostBlocksToTry = 64;

} // namespace

const char* to_string(EntityState state) noexcept {
  switch (state) {
    case EntityState::kResident:
      return "resident";
    case EntityState::kOutQueued:
      return "out_queued";
    case EntityState::kPagingOut:
      return "paging_out";
    case EntityState::kPagedOut:
      return "paged_out";
    case EntityState::kInQueued:
      return "in_queued";
    case EntityState::kPagingIn:
      return "paging_in";
    case EntityState::kDropped:
      return "dropped";
  }
  return "unknown";
}

PageinTransfer::~PageinTransfer() {
  if (block == nullptr || fence == nullptr) {
    return;
  }
  try {
    fence->wait(); // The copy writes to the block, which is about to get another owner.
  } catch (const std::exception&) {
    // The device is in error: there is no copy, and no next owner.
  }
}

EntityStorageImpl::EntityStorageImpl(
    std::unique_ptr<StorageBinding> binding,
    std::shared_ptr<TransferBackend> backend,
    size_t nbytes,
    uint64_t first_seen)
    : binding_(std::move(binding)),
      backend_(std::move(backend)),
      nbytes_(nbytes),
      first_seen_(first_seen) {}

EntityStorageImpl::~EntityStorageImpl() {
  release_copy();
}

// --- page-out ---------------------------------------------------------------

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

/// Nobody will use the bytes again: there is nothing to move.
bool EntityStorageImpl::unreferenced_locked() {
  if (binding_->referenced()) {
    return false;
  }
  out_ = nullptr;
  gone_.store(true, std::memory_order_release);
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

// --- page-in ----------------------------------------------------------------

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
  in_ = transfer;
  set_state(EntityState::kPagingIn);
  lock.unlock();
  try {
    if (recipe != nullptr) {
      transfer->block = recipe->make(&transfer->fence);
    } else {
      auto block = binding_->allocate(nbytes_);
      // Behind all submitted work: what used the block before, and kernels that
      // still use the host copy in place.
      transfer->fence =
          backend_->copy_to_device(block->data(), host, nbytes_, backend_->submitted_work());
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
  afterwards.copy_writes_block = arrival_locked() != nullptr;
  tell_allocator(lock, afterwards);
  return true;
}

void EntityStorageImpl::tell_allocator(Lock& lock, const Afterwards& afterwards) {
  if (!afterwards.copy_reads_block && !afterwards.copy_writes_block) {
    return;
  }
  pin(); // The block stays while the lock is given up.
  lock.unlock();
  if (afterwards.copy_reads_block) {
    binding_->keep_block_for_copy();
  }
  if (afterwards.copy_writes_block) {
    binding_->keep_block_for_arrival();
  }
  lock.lock();
  unpin();
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

void EntityStorageImpl::end_keeping() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    // Who calls a page-out off stops watching when the copy is over, and not before.
    if (state() != EntityState::kResident || calling_off_) {
      return; // nothing is kept
    }
    settled_.store(false, std::memory_order_seq_cst); // see Note [Pins and requests]
    if (!pinned() && !replaced()) {
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

// --- access -----------------------------------------------------------------

/// Null once it is over.
const FencePtr& EntityStorageImpl::arrival_locked() {
  if (arrival_ != nullptr && arrival_->done()) {
    arrival_ = nullptr;
    refresh_settled();
  }
  return arrival_;
}

void EntityStorageImpl::order_after_arrival_locked() {
  if (const FencePtr& copy = arrival_locked()) {
    backend_->order_after(copy);
  }
}

AccessResult EntityStorageImpl::access_locked(Lock& lock, Afterwards& afterwards) {
  ++accesses_;
  switch (state()) {
    case EntityState::kResident:
      if (calling_off_) {
        submitted_.wait(lock, [&] { return !calling_off_; });
        return access_locked(lock, afterwards);
      }
      order_after_arrival_locked();
      return AccessResult::kResident;
    case EntityState::kOutQueued:
    case EntityState::kPagingOut:
      return cancel_pageout_locked(lock, afterwards);
    case EntityState::kPagingIn:
      return finish_pagein_locked(lock, afterwards);
    case EntityState::kPagedOut:
    case EntityState::kInQueued:
    case EntityState::kDropped:
      break;
  }
  const bool dropped = state() == EntityState::kDropped;
  if (served_ != 0) {
    ++served_;
    return AccessResult::kServed;
  }
  const auto transfer = submit_pagein_locked(lock);
  if (!commit_pagein_locked(transfer)) {
    return access_locked(lock, afterwards); // another thread was faster
  }
  afterwards.recipe = std::move(transfer->recipe);
  order_after_arrival_locked();
  return dropped ? AccessResult::kRemade : AccessResult::kPagedIn;
}

AccessResult EntityStorageImpl::access() {
  Afterwards afterwards; // destroyed after unlocking
  Lock lock(mutex_);
  const AccessResult result = access_locked(lock, afterwards);
  tell_allocator(lock, afterwards);
  return result;
}

bool EntityStorageImpl::serve() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (state() == EntityState::kInQueued) {
    set_state(EntityState::kPagedOut);
  }
  if (state() != EntityState::kPagedOut) {
    return false;
  }
  ++served_;
  return true;
}

void EntityStorageImpl::end_service() noexcept {
  std::lock_guard<std::mutex> lock(mutex_);
  --served_;
}

// --- bytes that the host still has ---------------------------------------------

/// Gives the storage `address` for its block, if no op pins the entity: see Note [Pins and
/// requests]. Returns false where nothing has changed: nobody who looks meanwhile may take it for
/// gone, and forget it.
bool EntityStorageImpl::leave_locked(
    EntityState to,
    void* address,
    std::unique_ptr<DeviceBlock>* garbage) {
  set_state(EntityState::kPagingOut);
  if (!pinned()) {
    try {
      *garbage = binding_->install_host(address, shared_from_this());
    } catch (const std::bad_alloc&) { // for a few bytes: it stays, then
    }
  }
  if (*garbage == nullptr) {
    set_state(EntityState::kResident);
    return false;
  }
  set_state(to);
  binding_->watch();
  return true;
}

/// Note [Blocks that go before they are filled]
/// A program runs ahead of the device: an op may have used a block, and a plan let go of it, while
/// the copy that fills it still waits for its turn. That copy only reads the host's bytes. The
/// streams of all uses are behind it, and whoever frees the block tells the allocator of these
/// streams; where nobody has used it, `commit_pagein` has told of the copy. So what needs no copy
/// out need not wait for the copy in.
bool EntityStorageImpl::may_leave_locked(KeepAlive* keep) {
  void* device = nullptr;
  return state() == EntityState::kResident && !requesting_ && !calling_off_ && !gone() &&
         (*keep = binding_->acquire(nbytes_, &device)) != nullptr;
}

bool EntityStorageImpl::drop_unwritten(std::unique_ptr<DeviceBlock>* garbage) {
  const KeepAlive alive = binding_->hold(); // so that `acquire` never lets go of the last
  KeepAlive keep; // dropped after unlocking
  std::lock_guard<std::mutex> lock(mutex_);
  if (!keeps_copy() || !may_leave_locked(&keep) || !binding_->unwritten() ||
      !leave_locked(EntityState::kPagedOut, kept_.load(std::memory_order_relaxed), garbage)) {
    return false;
  }
  host_ = kept_.exchange(nullptr, std::memory_order_acq_rel);
  return true;
}

bool EntityStorageImpl::drop(
    const std::shared_ptr<Recipe>& recipe,
    void* unreadable,
    std::unique_ptr<DeviceBlock>* garbage) {
  const KeepAlive alive = binding_->hold(); // so that `acquire` never lets go of the last
  KeepAlive keep; // dropped after unlocking
  ReleasedCopy stale; // the same
  std::lock_guard<std::mutex> lock(mutex_);
  if (!may_leave_locked(&keep) || !binding_->referenced() ||
      !leave_locked(EntityState::kDropped, unreadable, garbage)) {
    return false;
  }
  recipe_ = recipe;
  stale = take_copy_locked();
  return true;
}

bool EntityStorageImpl::relocate(const std::function<bool(const void*)>& suits) {
  const KeepAlive alive = binding_->hold(); // so that `acquire` never lets go of the last
  const EarlierOps earlier{first_seen_, OpClock::this_thread()};
  std::vector<std::unique_ptr<DeviceBlock>> blocks; // go back after unlocking
  do {
    if (alive == nullptr || blocks.size() == kMostBlocksToTry ||
        state() != EntityState::kResident) {
      return false;
    }
    blocks.push_back(binding_->allocate(nbytes_));
  } while (!suits(blocks.back()->data()));
  KeepAlive keep; // dropped after unlocking
  std::lock_guard<std::mutex> lock(mutex_);
  if (earlier.running() || arrival_locked() != nullptr || !may_leave_locked(&keep) ||
      !binding_->on_home_stream()) {
    return false;
  }
  set_state(EntityState::kPagingOut); // See Note [Pins and requests].
  bool moved = false;
  try {
    moved = !pinned() &&
            backend_->copy_on_device(blocks.back()->data(), binding_->address(), nbytes_) &&
            binding_->exchange(blocks.back());
  } catch (...) {
    set_state(EntityState::kResident);
    throw;
  }
  set_state(EntityState::kResident);
  return moved;
}

void EntityStorageImpl::refuse(const std::string& why) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (state() == EntityState::kDropped && !replaced()) {
    binding_->refuse(why);
  }
}

void EntityStorageImpl::watch_writes() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (state() == EntityState::kResident && !replaced()) {
    binding_->watch();
  }
}

bool EntityStorageImpl::release_copy() noexcept {
  ReleasedCopy released; // after unlocking
  std::lock_guard<std::mutex> lock(mutex_);
  released = take_copy_locked();
  return static_cast<bool>(released);
}

EntityStorageImpl::ReleasedCopy EntityStorageImpl::take_copy_locked() noexcept {
  return {*backend_, kept_.exchange(nullptr, std::memory_order_acq_rel), arrival_};
}

bool EntityStorageImpl::touch(AccessResult* result) {
  Afterwards afterwards; // destroyed after unlocking
  Lock lock(mutex_);
  const EntityState now = state();
  if (now == EntityState::kPagedOut || now == EntityState::kInQueued ||
      now == EntityState::kDropped) {
    return false;
  }
  *result = access_locked(lock, afterwards);
  if (*result == AccessResult::kServed) { // a page-in failed while another access is served
    --served_;
    return false;
  }
  tell_allocator(lock, afterwards);
  return true;
}

FencePtr EntityStorageImpl::arrival() {
  std::lock_guard<std::mutex> lock(mutex_);
  return arrival_locked();
}

bool EntityStorageImpl::settled() {
  std::lock_guard<std::mutex> lock(mutex_);
  return arrival_locked() == nullptr && state() == EntityState::kResident && !calling_off_;
}

KeepAlive EntityStorageImpl::try_to_hold() noexcept {
  try {
    return binding_->hold();
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

void EntityStorageImpl::host_copy_released() noexcept {
  // Null where the storage dies. Where it could not be held it keeps its hook: until somebody is
  // about to write to it, it does not move.
  const KeepAlive keep = try_to_hold();
  std::shared_ptr<Recipe> recipe; // destroyed after unlocking
  std::shared_ptr<PageinTransfer> transfer;
  void* host = nullptr;
  {
    std::unique_lock<std::mutex> lock(mutex_);
    gone_.store(true, std::memory_order_release);
    if (keep != nullptr) {
      binding_->unwatch(); // What is watched next is the new memory, by another entity.
    }
    transfer = in_;
    if (transfer != nullptr) {
      submitted_.wait(lock, [&] { return transfer->submitted; });
    }
    in_ = nullptr;
    recipe.swap(recipe_);
    std::swap(host, host_);
    set_state(EntityState::kResident);
    submitted_.notify_all();
  }
  if (host != nullptr) {
    // Behind all work, which may be using the host copy in place.
    FencePtr after;
    try {
      after = transfer != nullptr && transfer->fence != nullptr ? transfer->fence
                                                                : backend_->submitted_work();
      backend_->free_host(host, after);
    } catch (...) {
      // The device is in error. Leaking the block is the only safe thing left.
    }
  }
}

const void* EntityStorageImpl::device_address() const {
  const KeepAlive keep = binding_->hold(); // dropped after unlocking
  std::lock_guard<std::mutex> lock(mutex_);
  return keep != nullptr && state() == EntityState::kResident ? binding_->address() : nullptr;
}

void* EntityStorageImpl::host_data() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return host_;
}

// --- the two moves, start to end ---------------------------------------------

bool EntityStorageImpl::pageout_internal_sync() {
  if (state() == EntityState::kResident && !request_pageout()) {
    return false;
  }
  if (pageout_must_wait()) {
    AccessResult ignored = AccessResult::kResident;
    touch(&ignored); // calls the request off
    return false;
  }
  std::shared_ptr<PageoutTransfer> transfer;
  if (!begin_pageout(&transfer)) {
    return false;
  }
  try {
    if (transfer->fence != nullptr) {
      transfer->fence->wait();
    }
  } catch (...) {
    abandon_pageout(transfer);
    throw;
  }
  std::unique_ptr<DeviceBlock> garbage;
  const CommitResult result = commit_pageout(transfer, &garbage);
  if (result == CommitResult::kInUse) {
    abandon_pageout(transfer);
  }
  return result == CommitResult::kCommitted;
}

bool EntityStorageImpl::pagein_internal_sync() {
  const AccessResult result = access();
  return result == AccessResult::kPagedIn || result == AccessResult::kPrefetched;
}

} // namespace torch_lms
