#include <extension/memory/CpuBlocks.h>

#include <sys/mman.h>

#include <algorithm>
#include <new>

namespace torch_lms {
namespace {

constexpr size_t kPageBytes = 4096;

/// At least a page; 0 if that is more than there are addresses.
size_t round_to_page(size_t nbytes) noexcept {
  return (std::max<size_t>(nbytes, 1) + kPageBytes - 1) / kPageBytes * kPageBytes;
}

} // namespace

CpuBlocks::CpuBlocks(size_t max_cached_bytes) : max_cached_bytes_(max_cached_bytes) {}

CpuBlocks::~CpuBlocks() {
  drop_cache();
}

void* CpuBlocks::allocate(size_t nbytes) {
  const size_t rounded = round_to_page(nbytes);
  if (rounded < nbytes) {
    throw std::bad_alloc();
  }
  if (void* data = take_cached(rounded)) {
    return data;
  }
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS;
  void* data = mmap(nullptr, rounded, PROT_READ | PROT_WRITE, flags, -1, 0);
  if (data == MAP_FAILED) {
    drop_cache(); // it may hold what is missing
    data = mmap(nullptr, rounded, PROT_READ | PROT_WRITE, flags, -1, 0);
  }
  if (data == MAP_FAILED) {
    throw std::bad_alloc();
  }
  return data;
}

void CpuBlocks::free(void* data, size_t nbytes) noexcept {
  if (data == nullptr) {
    return;
  }
  const size_t rounded = round_to_page(nbytes);
  if (rounded <= max_cached_bytes_) {
    shrink_cache(max_cached_bytes_ - rounded);
    if (add_cached(data, rounded)) {
      return;
    }
  }
  munmap(data, rounded);
}

size_t CpuBlocks::cached_bytes() const noexcept {
  std::lock_guard<std::mutex> lock(mutex_);
  return cached_bytes_;
}

void CpuBlocks::drop_cache() noexcept {
  shrink_cache(0);
}

/// The block of that size that was freed last: the likeliest to be in a CPU's cache.
void* CpuBlocks::take_cached(size_t nbytes) noexcept {
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = by_size_.upper_bound({nbytes, UINT64_MAX});
  if (found == by_size_.begin() || (--found)->first != nbytes) {
    return nullptr;
  }
  const auto block = by_age_.find(found->second);
  void* data = block->second.data;
  by_age_.erase(block);
  by_size_.erase(found);
  cached_bytes_ -= nbytes;
  return data;
}

/// Returns false if another thread filled the cache, or for want of memory.
bool CpuBlocks::add_cached(void* data, size_t nbytes) noexcept {
  std::lock_guard<std::mutex> lock(mutex_);
  if (cached_bytes_ > max_cached_bytes_ - nbytes) {
    return false;
  }
  const Age age = next_age_++;
  try {
    by_age_.emplace(age, Cached{data, nbytes});
    by_size_.emplace(nbytes, age);
  } catch (const std::bad_alloc&) {
    by_age_.erase(age);
    return false;
  }
  cached_bytes_ += nbytes;
  return true;
}

void CpuBlocks::shrink_cache(size_t to_bytes) noexcept {
  std::unique_lock<std::mutex> lock(mutex_);
  while (cached_bytes_ > to_bytes) {
    const Cached oldest = take_oldest_locked();
    lock.unlock();
    munmap(oldest.data, oldest.nbytes);
    lock.lock();
  }
}

CpuBlocks::Cached CpuBlocks::take_oldest_locked() noexcept {
  const auto oldest = by_age_.begin();
  const Cached block = oldest->second;
  by_size_.erase({block.nbytes, oldest->first});
  by_age_.erase(oldest);
  cached_bytes_ -= block.nbytes;
  return block;
}

} // namespace torch_lms
