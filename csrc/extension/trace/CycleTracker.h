#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>

#include <extension/trace/UseHistory.h>

namespace torch_lms {

/// A thread's copy of the shape, so that it need not be read anew for each use.
///
/// Not thread-safe: a thread's own.
struct KnownShape {
  CycleShape shape;
  uint64_t version = ~uint64_t{0};
};

/// Counts outermost ops and finds the cycles of a program that trains: a
/// cycle ends when a backward has ended and something else begins.
///
/// Thread-safe: every method may be called from any thread.
class CycleTracker {
 public:
  /// An outermost op begins; its time is later than that of every one before.
  uint64_t next_op() noexcept {
    return ops_.fetch_add(1, std::memory_order_relaxed) + 1;
  }
  uint64_t now() const noexcept {
    return ops_.load(std::memory_order_relaxed);
  }

  /// What is known of cycles does not hold any more: another program begins.
  void forget();

  /// An op has run, in backward or not. Returns whether a cycle has just ended.
  bool note_phase(bool backward) {
    return in_backward() != backward && change_phase(backward);
  }

  /// Whether a whole cycle is known: the shape has a length.
  bool knows_cycle() const noexcept {
    return length_.load(std::memory_order_relaxed) != 0;
  }

  bool in_backward() const noexcept {
    return in_backward_.load(std::memory_order_relaxed);
  }

  /// Takes no lock: every use asks for it.
  CycleShape shape() const noexcept {
    KnownShape known;
    return shape(known);
  }
  /// The same, and `known` is brought up to date.
  const CycleShape& shape(KnownShape& known) const noexcept {
    if (version_.load(std::memory_order_acquire) != known.version) {
      read_shape(known);
    }
    return known.shape;
  }

 private:
  bool change_phase(bool backward);
  void begin_cycle(uint64_t forward, uint64_t length, uint64_t began);
  void read_shape(KnownShape& known) const noexcept;

  std::atomic<uint64_t> ops_{0};
  std::atomic<bool> in_backward_{false};

  std::mutex mutex_; // of who writes what follows
  uint64_t backward_began_ = 0;
  std::atomic<uint64_t> version_{0}; // odd while the shape changes
  std::atomic<uint64_t> number_{0};
  std::atomic<uint64_t> began_{0};
  std::atomic<uint64_t> forward_{0};
  std::atomic<uint64_t> length_{0};
};

} // namespace torch_lms
