#pragma once

#include <atomic>
#include <cstdint>
#include <initializer_list>

namespace torch_lms {

/// What paging has done since the process began or the last reset. Any thread may update
/// any field.
struct TransferCounters {
  std::atomic<int64_t> pageouts{0};
  std::atomic<int64_t> pageout_bytes{0};
  std::atomic<int64_t> pageins{0};
  std::atomic<int64_t> pagein_bytes{0};
  std::atomic<int64_t> passive_pageins{0};
  std::atomic<int64_t> prefetches{0};
  std::atomic<int64_t> prefetch_hits{0};
  std::atomic<int64_t> cancelled_pageouts{0};
  std::atomic<int64_t> pagein_failures{0};

  /// Sets every counter to zero. Thread-safe.
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

} // namespace torch_lms
