#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <utility>

namespace torch_lms {

/// Blocks of main memory, each mapped on its own, so that a freed one goes back to
/// the system at once. Those freed last are kept for requests of the same size (in
/// pages), up to a number of bytes.
///
/// Thread-safe: every method may be called from any thread. The system is called
/// outside of the mutex.
class CpuBlocks {
 public:
  /// `max_cached_bytes`: of the freed blocks that are kept; 0 keeps none.
  explicit CpuBlocks(size_t max_cached_bytes = size_t{64} << 20);

  /// Drops the cache; blocks in use stay mapped.
  ~CpuBlocks();
  CpuBlocks(const CpuBlocks&) = delete;
  CpuBlocks& operator=(const CpuBlocks&) = delete;

  /// Page-aligned memory, a page for 0 bytes; its contents are arbitrary. Throws
  /// std::bad_alloc. Thread-safe.
  void* allocate(size_t nbytes);

  /// `data` and `nbytes` as `allocate` returned and took them; null is nothing.
  /// Thread-safe.
  void free(void* data, size_t nbytes) noexcept;

  /// Of the blocks that are kept. Thread-safe.
  size_t cached_bytes() const noexcept;

  /// Gives the blocks that are kept back to the system. Thread-safe.
  void drop_cache() noexcept;

 private:
  struct Cached {
    void* data;
    size_t nbytes;
  };
  using Age = uint64_t;

  void* take_cached(size_t nbytes) noexcept;
  bool add_cached(void* data, size_t nbytes) noexcept;
  void shrink_cache(size_t to_bytes) noexcept;
  Cached take_oldest_locked() noexcept;

  const size_t max_cached_bytes_;
  mutable std::mutex mutex_; ///< Guards all below.
  Age next_age_ = 0;
  std::map<Age, Cached> by_age_;
  std::set<std::pair<size_t, Age>> by_size_;
  size_t cached_bytes_ = 0;
};

} // namespace torch_lms
