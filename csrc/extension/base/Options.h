#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>

namespace torch_lms {

/// What automatic mode decides by. Each with the measurement that chose it, where there is one;
/// GPT 1.3B is 24 layers of 2048, 16 x 2048 tokens, on an H200 at 30 GiB of 57.
struct PolicyOptions {
  /// Allocations from this size on are large: rooms in one piece are looked for, and sizes
  /// remembered. The CUDA allocator keeps smaller ones in pools of their own.
  size_t large_bytes = size_t{1} << 20;

  /// Room beyond what is asked for (Note [Room in batches]): limit / margin_share, at most so
  /// much. GPT 1.3B: 1/32 and 1 GiB gave 1.07 of the link's bound, no margin 1.19.
  size_t margin_share = 32;
  size_t max_margin_bytes = size_t{1} << 30;

  /// What prefetches leave free, in units of the largest recent allocation: in one piece, and
  /// in all, in forward and in backward. Without them prefetched storages were the out-of-memory.
  size_t contiguous_reserve = 3;
  size_t forward_reserve = 1;
  size_t backward_reserve = 8;
  size_t max_prefetch_pending_bytes = size_t{2} << 30;
  size_t max_prefetch_batch_bytes = size_t{3} << 30;

  /// Ops after which a storage has cooled: what was used later is likely to be used again soon.
  uint64_t ops_to_cool = 6;

  /// What is needed soon goes last, also if it leaves without a copy: one in so many of what could
  /// go. Without backwards what is dirty is written in each pass, and would be copied out in each.
  size_t soon_share = 4;
  size_t soon_share_without_backward = 16;

  /// Of a page-out that must copy, where one without a copy costs 1, when memory in one piece is
  /// made. A step's copies go both ways at once; without backwards none is needed at all.
  size_t copy_cost = 2;
  size_t copy_cost_without_backward = 16;

  /// Storages that change places with what leaves without a copy, for one piece of memory. To look
  /// for each one's place takes 2 ms where there are 6500 storages, in which 50 MB are copied out.
  size_t most_to_trade = 8;

  /// Ops for which an order of what goes out serves: see Note [The order that is kept].
  uint64_t ops_to_keep_order = 16;

  /// Ops between two looks for what may come back: to ask the allocator takes as long as many ops.
  uint64_t ops_between_prefetches = 4;

  /// Calls between two looks for planned page-outs, which sort all candidates.
  size_t calls_between_plans = 8;

  int contiguous_tries = 3;

  /// Below this share of the limit (in quarters) ops are not watched: see Note [Learn, sleep, arm].
  size_t sleep_below_quarters = 3;
  /// Awake, memory is looked at whenever limit / peak_share bytes have been allocated in small
  /// blocks.
  size_t peak_share = 64;
  /// Outermost ops that make a cycle in a program that has no backward.
  uint64_t ops_in_cycle = 4096;

  /// Bounds of waits: for one transfer to end; for ops of other threads to let go of what has
  /// been copied; where nothing can go out and no op runs elsewhere; for all of one allocation.
  std::chrono::milliseconds patience{30000};
  std::chrono::milliseconds patience_with_ops{1000};
  std::chrono::milliseconds patience_alone{5};
  std::chrono::milliseconds patience_in_all{120000};
};

} // namespace torch_lms
