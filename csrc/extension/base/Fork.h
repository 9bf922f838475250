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

/// Note [Locks that a forked child takes]
/// The child has one thread; a lock that another one held stays held in it. It takes few of ours:
/// what it asks of the module beyond use is refused (`in_forked_child`), its ops are not looked at,
/// and what pages in or out does not run. What remains is held by the thread that forks, until the
/// fork is over on both sides: the pools' locks, that of `OpClock`, which a thread takes when it
/// ends, and that of whoever adds and removes callbacks of ops, since PyTorch has a lock of its own
/// under it, which an op takes where callbacks have changed. A thread that still has to learn of a
/// change takes PyTorch's lock as well, for less than a microsecond at its next op. Threads get a
/// millisecond for that before the fork; one that has run no op in it may, at the very moment of
/// the fork, leave the lock held in the child, where threads that the child starts would wait for
/// it. The one that forks has learnt before.

/// What is done around a fork by parts that `base` does not know, on the thread that forks. It may
/// be anywhere in the program: inside of an op, but not with any lock of ours.
struct ForkWatch {
  /// Calls `visit` with every host pool there is. Takes no lock.
  void (*visit_pools)(void (*visit)(HostPool* pool));
  /// Before the fork, and after it on both sides.
  void (*hold_callbacks)();
  void (*release_callbacks)();
  /// In the child: what other threads had changed for a while is as the program left it.
  void (*put_back)();
};

/// Watches for forks from now on. Before any other thread knows of paging; once.
void watch_forks(const ForkWatch& watch);

} // namespace torch_lms
