#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

#include <entity/SlabSource.h>

namespace torch_lms {

struct HostPoolOptions {
  size_t limit_bytes = SIZE_MAX; ///< Of all slabs together.
  size_t alignment = 4096; ///< Of every block, in size and address.
};

struct HostPoolStats {
  size_t slab_bytes = 0;
  size_t used_bytes = 0;
  size_t peak_used_bytes = 0;
  size_t limit_bytes = 0;
  size_t slabs = 0;
};

/// Divides slabs of host memory into blocks of exactly the size that is asked for
/// (rounded to the alignment), best fit, joining free neighbours.
///
/// Thread-safe: every method may be called from any thread, except
/// `reclone_after_fork`. Slabs are acquired and released outside of the mutex.
class HostPool {
 public:
  HostPool(std::unique_ptr<SlabSource> source, HostPoolOptions options);
  ~HostPool();
  HostPool(const HostPool&) = delete;
  HostPool& operator=(const HostPool&) = delete;

  /// Throws HostPoolFull when the limit is reached, and what the source throws.
  void* allocate(size_t nbytes);

  /// `data` comes from `allocate`.
  void free(void* data) noexcept;

  /// Gives slabs without a used block back to the source.
  void trim();

  /// Slabs that are over a lower limit stay until they are free and trimmed.
  void set_limit(size_t limit_bytes);

  HostPoolStats stats() const;

  /// In a forked child, where no other thread runs.
  void reclone_after_fork() noexcept;

 private:
  using Address = char*;

  size_t round_up(size_t nbytes) const noexcept;
  void* take_locked(size_t nbytes);
  void add_free_locked(Address at, size_t nbytes);
  void remove_free_locked(std::map<Address, size_t>::iterator at);
  size_t reserve_slab(size_t nbytes);
  std::vector<Slab> take_free_slabs_locked();
  bool same_slab_locked(Address left, Address right) const;

  const std::unique_ptr<SlabSource> source_;
  const size_t alignment_;

  mutable std::mutex mutex_;
  size_t limit_bytes_;
  size_t slab_bytes_ = 0; // reserved ones included
  size_t used_bytes_ = 0;
  size_t peak_used_bytes_ = 0;
  std::map<Address, Slab> slabs_;
  std::map<Address, size_t> free_;
  std::set<std::pair<size_t, Address>> free_by_size_;
  std::unordered_map<void*, size_t> used_;
};

} // namespace torch_lms
