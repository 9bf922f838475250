#pragma once

#include <cstddef>
#include <map>
#include <mutex>

namespace torch_lms {

/// Blocks of main memory, each mapped on its own, so that a freed one goes back to
/// the system at once. A few freed blocks are kept for requests of the same size.
///
/// Thread-safe: every method may be called from any thread.
class CpuBlocks {
 public:
  explicit CpuBlocks(size_t max_cached_bytes = size_t{64} << 20);
  ~CpuBlocks();
  CpuBlocks(const CpuBlocks&) = delete;
  CpuBlocks& operator=(const CpuBlocks&) = delete;

  /// Page-aligned memory. Throws std::bad_alloc.
  void* allocate(size_t nbytes);

  /// `nbytes` as it was given to `allocate`.
  void free(void* data, size_t nbytes) noexcept;

  size_t cached_bytes() const;
  void drop_cache() noexcept;

 private:
  const size_t max_cached_bytes_;
  mutable std::mutex mutex_;
  std::multimap<size_t, void*> cached_;
  size_t cached_bytes_ = 0;
};

} // namespace torch_lms
