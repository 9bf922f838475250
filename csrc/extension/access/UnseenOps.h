#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <set>

#include <c10/macros/Macros.h>
#include <extension/base/Interpreter.h>

namespace torch_lms {

/// Note [Ops that began unseen]
/// While nothing is out, ops are not observed. What another thread began then may use a storage
/// that is to be paged out now, and nothing tells of it. So who makes ops observed by hand, beside
/// other threads of Python's, waits for a moment in which no other thread of the process runs, at
/// most a second. (One after the other would not do: an op sleeps while others work for it.)
/// Python's lock is held meanwhile: a thread falls asleep when its op is over, instead of going on
/// to the next without a pause.
///
/// But a thread that wants the lock may be inside of its op: where PyTorch copies a tensor that
/// only a Python variable refers to, it takes the lock. So such threads are let go on for a moment,
/// again and again, until each has been seen elsewhere: it sleeps for another reason, has ended,
/// its Python code was in no call or has moved on from it, or it has begun an op that is observed
/// and that no other op has called. They are let go on whoever else runs: else a thread that
/// computes for long would keep an op from its end.
///
/// Python code calls nothing where a loop begins another turn, and where a function begins. There
/// a thread lets others have the lock. Other instructions may call anything: `while x` an op, if
/// `x` is a tensor.
///
/// Where the system does not say what a thread sleeps in (some sandboxes do not), or nobody where
/// Python's own data is, each thread of Python's that sleeps may want the lock: it is waited for
/// the whole second, unless it goes on.
///
/// Who asks for the same at that time waits as well. Ops stay observed from then on, so that it is
/// waited for once: until all is brought back, or for as long as to observe them costs less than to
/// wait again (`OpCallbacks::end_requests`). What this does not cover is in README.md, Limits.

/// What other threads may have begun before ops were observed.
///
/// `note_op` may be called by any thread. The rest is not thread-safe: one of these at a time,
/// whose methods are called with the GIL, and with no lock held that another thread may want.
class UnseenOps {
 public:
  UnseenOps();
  ~UnseenOps();
  UnseenOps(const UnseenOps&) = delete;
  UnseenOps& operator=(const UnseenOps&) = delete;

  /// Waits until it is over, as far as can be told; returns false if a second was not enough. Lets
  /// go of the GIL meanwhile, now and then.
  bool wait();

  /// The calling thread begins an op that is observed, outside of others that are.
  static void note_op() noexcept {
    if (C10_UNLIKELY(waited_for_.load(std::memory_order_relaxed))) {
      note_thread();
    }
  }

 private:
  /// What those do that may be inside of such an op.
  struct Others {
    bool run = false;
    bool want_lock = false;
  };

  static void note_thread() noexcept;
  void note_past();
  bool wants_lock(uint64_t thread) const;
  void look_at(uint64_t thread, Others* others);
  Others look();

  static std::atomic<bool> waited_for_;

  const uint64_t self_; // threads are known by the numbers that the system gives them
  std::set<uint64_t> past_; // that have been seen elsewhere
  const std::unique_ptr<PlacesOfThreads> places_; // when this was made; null where nobody knows
};

} // namespace torch_lms
