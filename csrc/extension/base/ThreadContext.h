#pragma once

#include <cstddef>
#include <cstdint>

namespace torch_lms {

class Device;

/// Why an allocation finds no room.
enum class Refusal : uint8_t {
  kByDevice, ///< There is room within the limit; the device's allocator finds no block.
  kPageoutsFail, ///< The host has no room, say.
  kPageoutsTakeLong,
  kNothingToGo,
};

/// Whether the thread is in a foreign call, as far as it is known: see Note [Foreign calls].
enum class InForeignCall : uint8_t {
  kAsk, ///< Nothing is kept: the thread is in no op.
  kUnknown,
  kNo,
  kYes,
};

/// What lower parts have to know of what the calling thread is doing. Each thread has its own.
struct ThreadContext {
  /// An address in the frame of the outermost op whose inputs are pinned; null outside of one.
  const void* op = nullptr;
  /// The name of that op.
  const char* op_name = nullptr;
  /// A number that no other op has, once somebody has needed one; else 0.
  uint64_t op_number = 0;
  /// What is found out while that op lasts, its end included, which lies outside of it.
  InForeignCall in_foreign_call = InForeignCall::kAsk;
  /// Of what it has pinned.
  size_t op_input_bytes = 0;
  /// Where its inputs lie, if they are large (Note [Ops larger than the limit]); else null.
  const Device* large_on = nullptr;
  /// What that device held before the op allocated, with all that is off it.
  size_t before_op_bytes = 0;
  /// Of the op's allocations that room was made for: all large ones, unless automatic mode sleeps.
  size_t op_allocated_bytes = 0;
  /// The most that these have held at once.
  size_t op_made_bytes = 0;
  /// Whether an allocation has been refused in it, or made beyond the limit for want of room.
  bool op_refused = false;
  /// Why room was last refused.
  Refusal refusal = Refusal::kByDevice;
  /// Allocations are for prefetches: they take what is free, push nothing out, and leave one
  /// free block of `contiguous_reserve_bytes`.
  bool for_prefetch = false;
  size_t contiguous_reserve_bytes = 0;
  /// A recipe's op runs: it reads what it has pinned, and writes to what it makes alone.
  bool replaying = false;
  /// An op is run again to see whether it makes the same: where there is no room it is not.
  bool auditions = false;
  /// All that has been dropped is made again: nothing may be dropped for it.
  bool undropping = false;

  /// Whether what is allocated now is an op's own: it takes as much each time.
  bool is_own() const noexcept {
    return op != nullptr && !for_prefetch && !auditions;
  }
};

inline ThreadContext& this_thread() noexcept {
  // A plain object in the thread's own block: read in one instruction.
  static thread_local ThreadContext context __attribute__((tls_model("initial-exec")));
  return context;
}

/// Allocations of the calling thread are for prefetches while one of these lives.
class PrefetchAllocations {
 public:
  explicit PrefetchAllocations(size_t contiguous_reserve_bytes) noexcept : before_(this_thread()) {
    this_thread().for_prefetch = true;
    this_thread().contiguous_reserve_bytes = contiguous_reserve_bytes;
  }
  ~PrefetchAllocations() {
    this_thread().for_prefetch = before_.for_prefetch;
    this_thread().contiguous_reserve_bytes = before_.contiguous_reserve_bytes;
  }
  PrefetchAllocations(const PrefetchAllocations&) = delete;
  PrefetchAllocations& operator=(const PrefetchAllocations&) = delete;

 private:
  const ThreadContext before_;
};

/// The calling thread auditions an op while one of these lives.
class Auditioning {
 public:
  Auditioning() noexcept {
    this_thread().auditions = true;
  }
  ~Auditioning() {
    this_thread().auditions = false;
  }
  Auditioning(const Auditioning&) = delete;
  Auditioning& operator=(const Auditioning&) = delete;
};

/// The calling thread runs a recipe's op while one of these lives.
class Replaying {
 public:
  Replaying() noexcept : before_(this_thread().replaying) {
    this_thread().replaying = true;
  }
  ~Replaying() {
    this_thread().replaying = before_;
  }
  Replaying(const Replaying&) = delete;
  Replaying& operator=(const Replaying&) = delete;

 private:
  const bool before_;
};

} // namespace torch_lms
