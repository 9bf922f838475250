#include <entity/HostPool.h>

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cassert>
#include <cerrno>
#include <iterator>
#include <new>
#include <string>

#include <entity/Error.h>

namespace torch_lms {
namespace {

constexpr size_t kSlabStepBytes = size_t{2} << 20;
constexpr size_t kMaxAlignment = 4096; // all that a slab's address is sure to have

/// The multiple of `step` from `nbytes` up; SIZE_MAX if there is none.
size_t round_to(size_t nbytes, size_t step) noexcept {
  return nbytes > SIZE_MAX - step ? SIZE_MAX : (nbytes + step - 1) / step * step;
}

void close_end(int& fd) noexcept {
  if (fd >= 0) {
    close(fd);
    fd = -1;
  }
}

} // namespace

HostPool::HostPool(std::unique_ptr<SlabSource> source, HostPoolOptions options)
    : alignment_(options.alignment), source_(std::move(source)), limit_bytes_(options.limit_bytes) {
  if (source_ == nullptr) {
    throw Error("expected a source of slabs, found none; give the pool one");
  }
  if (alignment_ == 0 || alignment_ > kMaxAlignment || (alignment_ & (alignment_ - 1)) != 0) {
    throw Error(
        "expected an alignment that is a power of two from 1 to " + std::to_string(kMaxAlignment) +
        " bytes, found " + std::to_string(alignment_) + "; choose one, or leave it out");
  }
}

HostPool::~HostPool() {
  for (auto& entry : slabs_) {
    source_->release(entry.second);
  }
}

size_t HostPool::round_up(size_t nbytes) const noexcept {
  return round_to(std::max<size_t>(nbytes, 1), alignment_);
}

void* HostPool::allocate(size_t nbytes) {
  const size_t rounded = round_up(nbytes);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (void* data = take_locked(rounded)) {
      return data;
    }
  }
  if (void* data = take_reclaimed(rounded, Urgency::kSpare)) {
    return data;
  }
  try {
    return grow(rounded);
  } catch (const Error&) { // the limit is reached, or the source has no more
    if (void* data = take_reclaimed(rounded, Urgency::kNeeded)) {
      return data;
    }
    throw;
  }
}

void HostPool::set_reclaim(Reclaim reclaim) {
  std::lock_guard<std::mutex> lock(mutex_);
  reclaim_ = std::move(reclaim);
}

/// A block that fits after what others can spare has come back; null if none does.
void* HostPool::take_reclaimed(size_t nbytes, Urgency urgency) {
  Lock lock(mutex_);
  const Reclaim reclaim = reclaim_;
  while (reclaim != nullptr) {
    lock.unlock();
    const bool some = reclaim(urgency);
    lock.lock();
    if (void* data = take_locked(nbytes)) {
      return data;
    }
    if (!some) {
      break;
    }
  }
  return nullptr;
}

// --- slabs ------------------------------------------------------------------------

/// Reserves a slab, then acquires it, then takes the block from it.
void* HostPool::grow(size_t nbytes) {
  std::lock_guard<std::mutex> resizing(resize_mutex_);
  const size_t wanted = std::max(round_to(nbytes, kSlabStepBytes), source_->slab_bytes());
  Lock lock(mutex_);
  if (void* data = make_room(lock, nbytes, wanted)) {
    return data;
  }
  bring_slab(lock, nbytes, reserve_locked(nbytes, wanted));
  void* data = take_locked(nbytes);
  if (data == nullptr) {
    throw_full_locked(nbytes); // the limit became lower meanwhile
  }
  return data;
}

/// Gives free slabs back until the wanted one fits the limit, or none is left.
/// Returns a block if one fits by now: another thread was faster, or freed one.
void* HostPool::make_room(Lock& lock, size_t nbytes, size_t wanted_bytes) {
  for (;;) {
    if (void* data = take_locked(nbytes)) {
      return data;
    }
    if (fits_locked(wanted_bytes) || !release_free_slab(lock)) {
      return nullptr;
    }
  }
}

bool HostPool::fits_locked(size_t slab_bytes) const noexcept {
  return slab_bytes_ <= limit_bytes_ && slab_bytes <= limit_bytes_ - slab_bytes_;
}

/// Counts a slab against the limit before it exists; the smallest is the block.
size_t HostPool::reserve_locked(size_t nbytes, size_t wanted_bytes) {
  if (!fits_locked(nbytes)) {
    throw_full_locked(nbytes);
  }
  const size_t room = (limit_bytes_ - slab_bytes_) / kSlabStepBytes * kSlabStepBytes;
  const size_t reserved = std::min(wanted_bytes, std::max(room, nbytes));
  slab_bytes_ += reserved;
  return reserved;
}

/// Adds the slab that was reserved, or takes the reservation back.
void HostPool::bring_slab(Lock& lock, size_t nbytes, size_t reserved_bytes) {
  Slab slab;
  lock.unlock();
  try {
    slab = acquire_up_to(reserved_bytes, nbytes);
    lock.lock();
    add_slab_locked(slab);
  } catch (...) {
    if (slab.data != nullptr) {
      lock.unlock();
      source_->release(slab);
    }
    lock.lock();
    slab_bytes_ -= reserved_bytes;
    throw;
  }
  slab_bytes_ = slab_bytes_ - reserved_bytes + slab.nbytes;
}

/// Where the system has no such slab, one that is just large enough may do.
Slab HostPool::acquire_up_to(size_t most_bytes, size_t nbytes) {
  const size_t least_bytes = std::min(most_bytes, round_to(nbytes, kSlabStepBytes));
  if (least_bytes < most_bytes) {
    try {
      return source_->acquire(most_bytes);
    } catch (const Error&) { // the next one says what is missing
    }
  }
  return source_->acquire(least_bytes);
}

void HostPool::add_slab_locked(const Slab& slab) {
  auto* begin = static_cast<Address>(slab.data);
  const auto block = blocks_.emplace(begin, Block{slab.nbytes, false, true}).first;
  try {
    slabs_.emplace(begin, slab);
  } catch (...) {
    blocks_.erase(block);
    throw;
  }
  index_locked(block);
}

/// Counted until it is gone, so that slabs are never over the limit together.
bool HostPool::release_free_slab(Lock& lock) noexcept {
  for (auto entry = slabs_.begin(); entry != slabs_.end(); ++entry) {
    const auto block = blocks_.find(entry->first);
    if (block->second.used || block->second.nbytes != entry->second.nbytes) {
      continue;
    }
    Slab slab = entry->second;
    const size_t nbytes = slab.nbytes;
    unindex_locked(block);
    blocks_.erase(block);
    slabs_.erase(entry);
    lock.unlock();
    source_->release(slab);
    lock.lock();
    slab_bytes_ -= nbytes;
    return true;
  }
  return false;
}

void HostPool::trim() noexcept {
  std::lock_guard<std::mutex> resizing(resize_mutex_);
  Lock lock(mutex_);
  while (release_free_slab(lock)) {
  }
}

void HostPool::set_limit(size_t limit_bytes) noexcept {
  Lock lock(mutex_);
  limit_bytes_ = limit_bytes;
  if (fits_locked(0)) {
    return;
  }
  lock.unlock(); // the order of the locks
  std::lock_guard<std::mutex> resizing(resize_mutex_);
  lock.lock();
  while (!fits_locked(0) && release_free_slab(lock)) {
  }
}

bool HostPool::replace_source(std::unique_ptr<SlabSource> source) {
  std::lock_guard<std::mutex> resizing(resize_mutex_);
  Lock lock(mutex_);
  while (release_free_slab(lock)) {
  }
  if (!slabs_.empty()) {
    return false;
  }
  source_.swap(source); // the old one ends without the locks
  return true;
}

HostPoolStats HostPool::stats() const noexcept {
  std::lock_guard<std::mutex> lock(mutex_);
  HostPoolStats stats;
  stats.slab_bytes = slab_bytes_;
  stats.used_bytes = used_bytes_;
  stats.limit_bytes = limit_bytes_;
  stats.slabs = slabs_.size();
  return stats;
}

void HostPool::throw_full_locked(size_t nbytes) const {
  const size_t largest = free_by_size_.empty() ? 0 : free_by_size_.rbegin()->first;
  throw HostPoolFull(
      "expected room for " + std::to_string(nbytes) + " more bytes of " + source_->name() +
      " for paged-out storages, found the limit of " + std::to_string(limit_bytes_) +
      " bytes reached (" + std::to_string(used_bytes_) + " bytes used, in slabs of " +
      std::to_string(slab_bytes_) + " bytes; largest free block " + std::to_string(largest) +
      " bytes); raise host_limit=, or page less out");
}

// --- blocks -----------------------------------------------------------------------

/// The free block that fits best, cut to size; null if none fits, or the limit has no room: slabs
/// that a lower limit found in use may be larger.
void* HostPool::take_locked(size_t nbytes) {
  if (used_bytes_ > limit_bytes_ || nbytes > limit_bytes_ - used_bytes_) {
    return nullptr;
  }
  const auto block = find_fit_locked(nbytes);
  if (block == blocks_.end()) {
    return nullptr;
  }
  const size_t rest = block->second.nbytes - nbytes;
  if (rest != 0) {
    index_locked(blocks_.emplace(block->first + nbytes, Block{rest, false, false}).first);
  }
  // Nothing below can fail.
  unindex_locked(block);
  block->second.nbytes = nbytes;
  block->second.used = true;
  used_bytes_ += nbytes;
  return block->first;
}

HostPool::Blocks::iterator HostPool::find_fit_locked(size_t nbytes) noexcept {
  const auto entry = free_by_size_.lower_bound({nbytes, nullptr});
  if (entry != free_by_size_.end()) {
    return blocks_.find(entry->second);
  }
  if (index_complete_) {
    return blocks_.end();
  }
  index_complete_ = true;
  auto fit = blocks_.end();
  for (auto block = blocks_.begin(); block != blocks_.end(); ++block) {
    if (block->second.used) {
      continue;
    }
    index_locked(block);
    if (block->second.nbytes >= nbytes &&
        (fit == blocks_.end() || block->second.nbytes < fit->second.nbytes)) {
      fit = block;
    }
  }
  return fit;
}

void HostPool::free(void* data) noexcept {
  if (data == nullptr) {
    return;
  }
  std::lock_guard<std::mutex> lock(mutex_);
  auto block = blocks_.find(static_cast<Address>(data));
  assert(block != blocks_.end() && block->second.used && "expected a block of this pool in use");
  if (block == blocks_.end() || !block->second.used) {
    return;
  }
  block->second.used = false;
  used_bytes_ -= block->second.nbytes;
  const auto right = std::next(block);
  if (right != blocks_.end() && can_join_locked(block, right)) {
    join_locked(block, right);
  }
  if (block != blocks_.begin() && can_join_locked(std::prev(block), block)) {
    const auto left = std::prev(block);
    join_locked(left, block);
    block = left;
  }
  index_locked(block);
}

/// Neighbours in the map are neighbours in memory, unless a slab begins between.
bool HostPool::can_join_locked(Blocks::iterator left, Blocks::iterator right) noexcept {
  return !left->second.used && !right->second.used && !right->second.begins_slab;
}

/// `left` is out of the index afterwards.
void HostPool::join_locked(Blocks::iterator left, Blocks::iterator right) noexcept {
  unindex_locked(left);
  unindex_locked(right);
  left->second.nbytes += right->second.nbytes;
  blocks_.erase(right);
}

/// Freeing must not fail for want of memory: a block that is not in the index is
/// found by its neighbours, or by a search when nothing else fits.
void HostPool::index_locked(Blocks::iterator block) noexcept {
  try {
    free_by_size_.emplace(block->second.nbytes, block->first);
  } catch (const std::bad_alloc&) {
    index_complete_ = false;
  }
}

void HostPool::unindex_locked(Blocks::iterator block) noexcept {
  free_by_size_.erase({block->second.nbytes, block->first});
}

// --- forks ------------------------------------------------------------------------

void HostPool::prepare_fork() noexcept {
  resize_mutex_.lock();
  mutex_.lock();
  forking_ = true;
  const bool shares =
      std::any_of(slabs_.begin(), slabs_.end(), [](const std::pair<const Address, Slab>& entry) {
        return entry.second.fd >= 0;
      });
  if (!shares || pipe2(fork_pipe_.data(), O_CLOEXEC) != 0) {
    fork_pipe_ = {{-1, -1}};
  }
}

void HostPool::after_fork_in_parent() noexcept {
  if (!forking_) {
    return;
  }
  close_end(fork_pipe_[1]);
  char byte = 0;
  while (fork_pipe_[0] >= 0 && read(fork_pipe_[0], &byte, 1) < 0 && errno == EINTR) {
  }
  close_end(fork_pipe_[0]);
  forking_ = false;
  mutex_.unlock();
  resize_mutex_.unlock();
}

void HostPool::reclone_after_fork() noexcept {
  for (auto& entry : slabs_) {
    source_->reclone_after_fork(entry.second);
  }
  if (!forking_) {
    return;
  }
  if (fork_pipe_[1] >= 0) {
    const ssize_t written = write(fork_pipe_[1], "", 1); // the parent may go on
    static_cast<void>(written);
  }
  close_end(fork_pipe_[0]);
  close_end(fork_pipe_[1]);
  forking_ = false;
  mutex_.unlock();
  resize_mutex_.unlock();
}

} // namespace torch_lms
