#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>

#include <extension/policy/PolicyState.h>

namespace torch_lms {

/// Note [Learn, sleep, arm]
/// An op that is watched takes longer than one that is not, so ops are watched while that may
/// be of use. From `enable` on the policy *learns*: it sees one cycle of the program. If the memory
/// then stayed below three quarters of the limit, nothing is out and one thread has run all ops
/// (with the autograd engine's, which run while it waits), the policy *sleeps*: no op tells
/// anything, and allocations spend a budget (Note [The budget of allocations]). When the watermark
/// is crossed it is *armed*.
///
/// Ops that are running when it is armed have not told what they use. So nothing goes out until
/// the thread that armed it has come back from whatever it was calling (`note_boundary`), and
/// then only what has been used since: the limit gives way meanwhile. When Python's main thread
/// is between two of its instructions, no op of the one thread runs (`note_quiet`): what has been
/// made while nobody watched is looked for then (swap/discovery.py), and everything may go. A new
/// thread wakes it.

enum class Attention : uint8_t { kOff, kLearning, kArmed, kAsleep };

/// Whether the policy learns, sleeps or is armed, and what may go out because of that.
///
/// Thread-safe: every method may be called from any thread, with and without the GIL. Who changes
/// the attention blocks on a mutex, under which ops' callbacks come and go; the others block on
/// nothing. None waits.
class Wakefulness {
 public:
  explicit Wakefulness(PolicyState& state) : state_(state) {}

  Attention attention() const noexcept {
    return attention_.load(std::memory_order_acquire);
  }
  bool enabled() const noexcept {
    return attention() != Attention::kOff;
  }

  /// Automatic mode has begun; `learn` follows when all is set up. `end`: it has ended.
  void begin() {
    attention_.store(Attention::kLearning);
  }
  void learn();
  void end();

  /// If it sleeps, it does not any more. `arm`: nothing goes out until the calling thread has come
  /// back from what it is calling; `wake`: it calls nothing, but has been told of a new thread.
  void arm();
  void wake();

  /// An outermost op of the calling thread has ended. Returns whether a backward has.
  bool after_op(bool on_main_thread, bool of_program, bool backward) {
    if (!on_main_thread && !backward) {
      other_threads_.store(true, std::memory_order_relaxed);
    }
    if (of_program && state_.cycles.note_phase(backward)) {
      end_cycle();
      return true;
    }
    if (!state_.cycles.knows_cycle() &&
        state_.cycles.now() - cycle_began_.load(std::memory_order_relaxed) >
            state_.options.ops_in_cycle) {
      end_cycle();
    }
    return false;
  }

  /// The thread that armed the policy is inside no op that began before.
  void note_boundary() noexcept;
  /// Python's main thread is between two instructions, and all storages have been made known.
  void note_quiet() noexcept;
  /// The autograd engine goes on to a node on the calling thread: what ran there has ended.
  void note_node_begins() noexcept;
  bool wants_boundary() const noexcept {
    return boundary_wanted_.load(std::memory_order_acquire);
  }

  /// Whether the calling thread may let page-outs be committed now: see Note [Foreign calls] and
  /// Note [Learn, sleep, arm]. Takes microseconds.
  bool may_vacate() const;
  /// Uses before it do not make an entity eligible to go out.
  uint64_t eligible_from() const noexcept {
    return eligible_from_.load();
  }

  /// Grants what is left to the limit, or to the watermark. False if that is too little.
  bool fill_budget(Device& device, size_t nbytes);

 private:
  void end_cycle();
  bool may_sleep();
  void sleep();

  PolicyState& state_;
  std::atomic<Attention> attention_{Attention::kOff};
  std::mutex mutex_; // of who changes it; taken before everything else but Python's lock
  std::atomic<bool> boundary_wanted_{false};
  std::atomic<uint64_t> boundary_thread_{0};
  std::atomic<uint64_t> eligible_from_{0};
  std::atomic<bool> other_threads_{false}; // in this cycle
  std::atomic<uint64_t> cycle_began_{0}; // where there is no backward
};

} // namespace torch_lms
