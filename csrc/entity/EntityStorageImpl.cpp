// What is not here: page-outs (EntityPageout.cpp) and page-ins (EntityPagein.cpp).

#include <entity/EntityStorageImpl.h>

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
  was_served_ = true;
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
  // `referenced` counts one hold for none: it is asked before there are two.
  if (alive == nullptr || !binding_->referenced() || !may_leave_locked(&keep) ||
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
  binding_->keep_block_for_streams(*blocks.back());
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
