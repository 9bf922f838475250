#pragma once

#include <chrono>
#include <exception>
#include <mutex>
#include <vector>

#include <extension/transfer/PagerState.h>

namespace torch_lms {

/// The one place of commits: what the workers have finished becomes so for the program.
///
/// Commits happen on threads that run ops: at the boundaries of ops, when memory
/// is asked for and in the waits. So a storage moves only inside a call into
/// PyTorch or torch-lms, never between two statements of a program, and never inside another
/// extension's function (Note [Foreign calls]).
///
/// Thread-safe: every method may be called from any thread, with and without the GIL. Those that
/// wait say so; they wait for the workers, which take no lock of Python's.
class Commits {
 public:
  explicit Commits(PagerState& state) : state_(state) {}

  /// How long who waits bears with ops of other threads that use what is to move.
  static constexpr std::chrono::seconds kPatience{60};
  /// Between two looks at them.
  static constexpr std::chrono::microseconds kMomentForOps{50};

  /// Commits what the workers have finished; waits for nothing. `allocating`: the device whose
  /// allocator's lock the caller holds, if any. No storage may be destroyed then, and nothing of
  /// another device is freed, whose lock another thread may hold while it wants this one.
  void commit_finished(const Device* allocating = nullptr);

  /// Waits until all page-outs are committed that there are now, at most a minute for ops of
  /// other threads that use what is to go; inside of an op not for these at all: see Note [Waits
  /// inside of ops]. Rethrows what failed.
  void wait_pageouts();
  /// Waits until all page-ins are committed. Rethrows what failed, but for
  /// prefetches that found no room: those are counted and stay paged out.
  void wait_pageins();

 private:
  void commit_pageouts(std::vector<KeepAlive>& dropped, const Device* allocating);
  CommitResult commit_pageout(FinishedTransfer& finished);
  void commit_pageins();
  void settle_prefetches();

  PagerState& state_;
  std::mutex mutex_; // guards what follows
  std::vector<KeepAlive> dropped_; // to be destroyed outside of an allocator
  std::exception_ptr failed_; // See Note [Page-ins that are not committed].
};

} // namespace torch_lms
