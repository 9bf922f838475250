#pragma once

#include <atomic>
#include <cstdint>

namespace torch_lms {

/// What paging has done so far. Every field may be updated from any thread.
struct Stats {
  std::atomic<int64_t> pageout_bytes{0};
  std::atomic<int64_t> pagein_bytes{0};
  std::atomic<int64_t> pageouts{0};
  std::atomic<int64_t> pageins{0};
  std::atomic<int64_t> passive_pageins{0};
  std::atomic<int64_t> prefetches{0};
  std::atomic<int64_t> prefetch_hits{0};
  std::atomic<int64_t> cancelled_pageouts{0};
  std::atomic<int64_t> host_served{0};
  std::atomic<int64_t> pagein_failures{0};
  std::atomic<int64_t> allocation_retries{0};
  std::atomic<int64_t> wait_us{0};

  /// Sets every counter to zero.
  void reset() noexcept {
    for (auto* counter :
         {&pageout_bytes,
          &pagein_bytes,
          &pageouts,
          &pageins,
          &passive_pageins,
          &prefetches,
          &prefetch_hits,
          &cancelled_pageouts,
          &host_served,
          &pagein_failures,
          &allocation_retries,
          &wait_us}) {
      counter->store(0);
    }
  }
};

} // namespace torch_lms
