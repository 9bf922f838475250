#pragma once

#include <atomic>
#include <cstdint>

namespace torch_lms {

/// Tells which ops were already running when an entity was first seen.
///
/// Note [Who may still use a storage]
/// An op pins the entities among its inputs before it runs, so a pinned entity
/// is never committed to the host, and it calls off a page-out of theirs that is under
/// way. An op pins nothing if it began before the entity existed, or, in a program that
/// pages by hand, while nothing was on its way out: then it did not look. Nor has it pinned what
/// it has made inside of itself, when an op that it calls shows that. `OpClock`
/// covers those: every thread publishes the tick at which its outermost op began; an
/// entity remembers the tick before which ops could not know it, a request by hand the tick at
/// which every op had begun to look. An op of another thread that began at or before this
/// tick and still runs when the page-out is requested may yet submit work that reads or
/// writes the bytes: the copy waits until it ends, and for the work that is submitted
/// by then. The order of the accesses makes it safe: an op publishes its tick
/// (sequentially consistent) before it looks entities up, and an entity, or the news
/// that something is on its way out, is published before the tick is taken.
class OpClock {
 public:
  /// Names a thread; no other ever has the same. 0 names none.
  using Thread = uint64_t;

  static OpClock& get() noexcept {
    return clock_;
  }

  /// The outermost op of the calling thread begins. Thread-safe.
  void begin_op() noexcept {
    this_thread_slot().running_since.store(
        now_.load(std::memory_order_relaxed), std::memory_order_seq_cst);
  }

  /// The outermost op of the calling thread has ended. Thread-safe.
  void end_op() noexcept {
    this_thread_slot().running_since.store(0, std::memory_order_release);
  }

  /// A new tick, later than that of every op that is running. Thread-safe.
  uint64_t tick() noexcept;

  /// The calling thread. Thread-safe.
  static Thread this_thread() noexcept {
    return this_thread_slot().thread;
  }

  /// Forked children find the clock's lock free from now on. Threads that run ops call it; who
  /// has locks to take before a fork calls it before its own `pthread_atfork`, so that this lock,
  /// which comes after all others, is taken last.
  static void watch_forks() noexcept;

  /// Whether an op that began at or before `tick` is still running on a thread
  /// other than `except`. Thread-safe.
  bool running_since(uint64_t tick, Thread except = this_thread()) noexcept;

 private:
  struct Slot {
    std::atomic<uint64_t> running_since{0};
    Thread thread = 0;
    Slot* next = nullptr;
  };
  struct SlotList;
  struct ThreadSlot;

  constexpr OpClock() = default;
  static SlotList& slot_list();
  static Slot& make_slot() noexcept;
  static Slot& this_thread_slot() noexcept {
    return own_slot_ != nullptr ? *own_slot_ : make_slot();
  }

  // Read by every op: neither an object with a destructor nor one that has to be made first.
  static OpClock clock_;
  static __thread Slot* own_slot_ __attribute__((tls_model("initial-exec")));

  // 0 is kept for "no op is running".
  std::atomic<uint64_t> now_{1};
};

/// Ops of other threads than `requester` that began at or before `tick`: those that may use
/// an entity without having pinned it.
struct EarlierOps {
  uint64_t tick = 0; // 0: there are none
  OpClock::Thread requester = 0;

  bool running() const noexcept {
    return tick != 0 && OpClock::get().running_since(tick, requester);
  }
};

} // namespace torch_lms
