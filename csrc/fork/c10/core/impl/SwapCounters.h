#pragma once

#include <atomic>
#include <cstdint>
#include <initializer_list>

#include <c10/macros/Macros.h>

namespace c10 {
namespace impl {

/// What paging has done since the process began or the last reset. Any thread may update
/// any field.
struct SwapCounters {
  std::atomic<int64_t> pageouts{0};
  std::atomic<int64_t> pageout_bytes{0};
  std::atomic<int64_t> pageins{0};
  std::atomic<int64_t> pagein_bytes{0};
  std::atomic<int64_t> passive_pageins{0};
  std::atomic<int64_t> prefetches{0};
  std::atomic<int64_t> prefetch_hits{0};
  std::atomic<int64_t> cancelled_pageouts{0};
  std::atomic<int64_t> pagein_failures{0};

  // Gauges: what is on the host at this moment.
  std::atomic<int64_t> paged_out_storages{0};
  std::atomic<int64_t> paged_out_bytes{0};

  /// Sets every counter to zero; gauges stay.
  void reset() noexcept {
    for (auto* counter :
         {&pageouts,
          &pageout_bytes,
          &pageins,
          &pagein_bytes,
          &passive_pageins,
          &prefetches,
          &prefetch_hits,
          &cancelled_pageouts,
          &pagein_failures}) {
      counter->store(0, std::memory_order_relaxed);
    }
  }
};

/// Those of the process.
C10_API SwapCounters& swap_counters() noexcept;

inline void count(std::atomic<int64_t>& counter, int64_t by = 1) noexcept {
  counter.fetch_add(by, std::memory_order_relaxed);
}

} // namespace impl
} // namespace c10
