#pragma once

#include <cstddef>
#include <mutex>
#include <vector>

#include <entity/CudaEntityTransferQueue.h>

#include <extension/EntityTable.h>

namespace torch_lms {

/// Page-ins that the thread which asks for them begins itself, where copies are
/// asynchronous: their place among the ops decides what they wait for. The first use
/// of an entity commits its page-in.
///
/// Thread-safe: every method may be called from any thread.
class DirectPrefetches {
 public:
  /// Begins a page-in that takes what memory is free, pushes nothing out and leaves one
  /// free block of `contiguous_reserve_bytes`. Returns false if the entity is not paged
  /// out, or there is no such room.
  bool begin(const EntityPtr& entity, size_t contiguous_reserve_bytes);

  /// Takes out the latest that nobody has used yet and calls it off. Null if there is none.
  EntityPtr cancel_last();

  /// Takes all out, those that have been used included.
  std::vector<FinishedTransfer> take_all();

 private:
  std::mutex mutex_;
  std::vector<FinishedTransfer> begun_;
};

/// Allocations of the calling thread are for prefetches while one of these lives.
class PrefetchAllocations {
 public:
  explicit PrefetchAllocations(size_t contiguous_reserve_bytes = 0) noexcept;
  ~PrefetchAllocations();
  PrefetchAllocations(const PrefetchAllocations&) = delete;
  PrefetchAllocations& operator=(const PrefetchAllocations&) = delete;
};

/// The calling thread is a worker: all its allocations are for prefetches.
void allocate_for_prefetches() noexcept;

/// Whether allocations of the calling thread are for prefetches: they take what is free,
/// push nothing out, and leave one free block of `contiguous_reserve_bytes`.
bool allocates_for_prefetch() noexcept;
size_t contiguous_reserve_bytes() noexcept;

} // namespace torch_lms
