#include <entity/CpuBlocks.h>

#include <sys/mman.h>

#include <new>
#include <utility>

namespace torch_lms {
namespace {

constexpr size_t kPageBytes = 4096;

size_t round_to_page(size_t nbytes) noexcept {
  return (nbytes + kPageBytes - 1) / kPageBytes * kPageBytes;
}

} // namespace

CpuBlocks::CpuBlocks(size_t max_cached_bytes) : max_cached_bytes_(max_cached_bytes) {}

CpuBlocks::~CpuBlocks() {
  drop_cache();
}

void* CpuBlocks::allocate(size_t nbytes) {
  const size_t rounded = round_to_page(nbytes);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto at = cached_.find(rounded);
    if (at != cached_.end()) {
      void* data = at->second;
      cached_.erase(at);
      cached_bytes_ -= rounded;
      return data;
    }
  }
  void* data =
      mmap(nullptr, rounded, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) {
    throw std::bad_alloc();
  }
  return data;
}

void CpuBlocks::free(void* data, size_t nbytes) noexcept {
  const size_t rounded = round_to_page(nbytes);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (cached_bytes_ + rounded <= max_cached_bytes_) {
      cached_.emplace(rounded, data);
      cached_bytes_ += rounded;
      return;
    }
  }
  munmap(data, rounded);
}

size_t CpuBlocks::cached_bytes() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return cached_bytes_;
}

void CpuBlocks::drop_cache() noexcept {
  std::multimap<size_t, void*> cached;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    cached.swap(cached_);
    cached_bytes_ = 0;
  }
  for (const auto& entry : cached) {
    munmap(entry.second, entry.first);
  }
}

} // namespace torch_lms
