#pragma once

#include <atomic>

namespace torch_lms {

class HostPool;

/// Set once, in the child. Every op asks.
inline std::atomic<bool> forked{false};

/// Whether this process was forked from one that used paging. Workers and locks
/// stayed in the parent: the child keeps paged-out storages where they are (they
/// are readable and writable in place, and its own) and moves nothing.
inline bool in_forked_child() noexcept {
  return forked.load(std::memory_order_relaxed);
}

/// Calls `visit` with every host pool there is. Takes no lock.
using VisitPools = void (*)(void (*visit)(HostPool* pool));

/// Watches for forks from now on. Before any other thread knows of paging; once.
void watch_forks(VisitPools pools);

} // namespace torch_lms
