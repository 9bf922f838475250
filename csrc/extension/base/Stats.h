#pragma once

#include <atomic>
#include <cstdint>

#include <entity/TransferCounters.h>

namespace torch_lms {

/// What the extension counts besides. Any thread may update any field.
struct Stats : TransferCounters {
  std::atomic<int64_t> host_served{0};
  std::atomic<int64_t> dropped_bytes{0};
  std::atomic<int64_t> recomputable_bytes{0};
  std::atomic<int64_t> recomputed_bytes{0};
  std::atomic<int64_t> recomputations{0};
  std::atomic<int64_t> limit_exceeded{0};
  std::atomic<int64_t> allocation_retries{0};
  std::atomic<int64_t> wait_us{0};

  /// Sets every counter to zero. Thread-safe.
  void reset() noexcept {
    TransferCounters::reset();
    for (auto* counter :
         {&host_served,
          &dropped_bytes,
          &recomputable_bytes,
          &recomputed_bytes,
          &recomputations,
          &limit_exceeded,
          &allocation_retries,
          &wait_us}) {
      counter->store(0, std::memory_order_relaxed);
    }
  }
};

} // namespace torch_lms
