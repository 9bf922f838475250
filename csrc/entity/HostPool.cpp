#include <entity/HostPool.h>

#include <algorithm>
#include <string>

#include <entity/Error.h>

namespace torch_lms {
namespace {

constexpr size_t kSlabAlignment = size_t{2} << 20;

size_t round_to(size_t nbytes, size_t alignment) noexcept {
  return (nbytes + alignment - 1) / alignment * alignment;
}

} // namespace

HostPool::HostPool(std::unique_ptr<SlabSource> source, HostPoolOptions options)
    : source_(std::move(source)), alignment_(options.alignment), limit_bytes_(options.limit_bytes) {}

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
  for (;;) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (void* data = take_locked(rounded)) {
        return data;
      }
    }
    const size_t slab_bytes = reserve_slab(rounded);
    Slab slab;
    try {
      slab = source_->acquire(slab_bytes);
    } catch (...) {
      std::lock_guard<std::mutex> lock(mutex_);
      slab_bytes_ -= slab_bytes;
      throw;
    }
    std::lock_guard<std::mutex> lock(mutex_);
    auto* begin = static_cast<Address>(slab.data);
    slabs_.emplace(begin, slab);
    add_free_locked(begin, slab.nbytes);
    if (void* data = take_locked(rounded)) {
      return data;
    }
  }
}

/// Counts a slab against the limit before it exists; free slabs make way.
size_t HostPool::reserve_slab(size_t nbytes) {
  const size_t least = round_to(nbytes, kSlabAlignment);
  const size_t preferred = std::max(least, source_->slab_bytes());
  std::vector<Slab> released;
  size_t reserved = 0;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (slab_bytes_ + preferred > limit_bytes_) {
      released = take_free_slabs_locked();
    }
    const size_t room = limit_bytes_ > slab_bytes_ ? limit_bytes_ - slab_bytes_ : 0;
    if (room >= nbytes) {
      reserved = std::min(preferred, std::max(room / kSlabAlignment * kSlabAlignment, nbytes));
      slab_bytes_ += reserved;
    }
  }
  for (Slab& slab : released) {
    source_->release(slab);
  }
  if (reserved == 0) {
    const HostPoolStats now = stats();
    throw HostPoolFull(
        std::string("expected room for ") + std::to_string(nbytes) + " more bytes of " +
        source_->name() + " for paged-out storages, found the limit of " +
        std::to_string(now.limit_bytes) + " bytes reached (" + std::to_string(now.used_bytes) +
        " bytes used, in slabs of " + std::to_string(now.slab_bytes) +
        " bytes); raise host_limit= in torch_lms.enable or SwapEnv, or page less out");
  }
  return reserved;
}

void* HostPool::take_locked(size_t nbytes) {
  const auto best = free_by_size_.lower_bound({nbytes, nullptr});
  if (best == free_by_size_.end()) {
    return nullptr;
  }
  const Address at = best->second;
  const size_t found = best->first;
  remove_free_locked(free_.find(at));
  if (found > nbytes) {
    free_.emplace(at + nbytes, found - nbytes);
    free_by_size_.emplace(found - nbytes, at + nbytes);
  }
  used_.emplace(at, nbytes);
  used_bytes_ += nbytes;
  peak_used_bytes_ = std::max(peak_used_bytes_, used_bytes_);
  return at;
}

void HostPool::free(void* data) noexcept {
  if (data == nullptr) {
    return;
  }
  std::lock_guard<std::mutex> lock(mutex_);
  const auto at = used_.find(data);
  if (at == used_.end()) {
    return;
  }
  const size_t nbytes = at->second;
  used_bytes_ -= nbytes;
  used_.erase(at);
  add_free_locked(static_cast<Address>(data), nbytes);
}

bool HostPool::same_slab_locked(Address left, Address right) const {
  auto slab = slabs_.upper_bound(right);
  --slab;
  return slab->first <= left;
}

void HostPool::remove_free_locked(std::map<Address, size_t>::iterator at) {
  free_by_size_.erase({at->second, at->first});
  free_.erase(at);
}

void HostPool::add_free_locked(Address at, size_t nbytes) {
  auto right = free_.lower_bound(at);
  if (right != free_.end() && right->first == at + nbytes && same_slab_locked(at, right->first)) {
    nbytes += right->second;
    const auto next = std::next(right);
    remove_free_locked(right);
    right = next;
  }
  if (right != free_.begin()) {
    const auto left = std::prev(right);
    if (left->first + left->second == at && same_slab_locked(left->first, at)) {
      at = left->first;
      nbytes += left->second;
      remove_free_locked(left);
    }
  }
  free_.emplace(at, nbytes);
  free_by_size_.emplace(nbytes, at);
}

std::vector<Slab> HostPool::take_free_slabs_locked() {
  std::vector<Slab> taken;
  for (auto slab = slabs_.begin(); slab != slabs_.end();) {
    const auto block = free_.find(slab->first);
    if (block != free_.end() && block->second == slab->second.nbytes) {
      remove_free_locked(block);
      slab_bytes_ -= slab->second.nbytes;
      taken.push_back(slab->second);
      slab = slabs_.erase(slab);
    } else {
      ++slab;
    }
  }
  return taken;
}

void HostPool::trim() {
  std::vector<Slab> released;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    released = take_free_slabs_locked();
  }
  for (Slab& slab : released) {
    source_->release(slab);
  }
}

void HostPool::set_limit(size_t limit_bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  limit_bytes_ = limit_bytes;
}

HostPoolStats HostPool::stats() const {
  std::lock_guard<std::mutex> lock(mutex_);
  HostPoolStats stats;
  stats.slab_bytes = slab_bytes_;
  stats.used_bytes = used_bytes_;
  stats.peak_used_bytes = peak_used_bytes_;
  stats.limit_bytes = limit_bytes_;
  stats.slabs = slabs_.size();
  return stats;
}

void HostPool::reclone_after_fork() noexcept {
  for (auto& entry : slabs_) {
    source_->reclone_after_fork(entry.second);
  }
}

} // namespace torch_lms
