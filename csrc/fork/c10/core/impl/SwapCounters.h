#pragma once

#include <atomic>
#include <cstdint>

#include <c10/core/impl/TransferCounters.h>
#include <c10/macros/Macros.h>

namespace c10 {
namespace impl {

/// Counters, and gauges, which a reset leaves as they are: what is on the host at this
/// moment. Any thread may update any field.
struct SwapCounters : torch_lms::TransferCounters {
  std::atomic<int64_t> paged_out_storages{0};
  std::atomic<int64_t> paged_out_bytes{0};
};

/// Those of the process.
C10_API SwapCounters& swap_counters() noexcept;

inline void count(std::atomic<int64_t>& counter, int64_t by = 1) noexcept {
  counter.fetch_add(by, std::memory_order_relaxed);
}

} // namespace impl
} // namespace c10
