#include <entity/TransferEpochs.h>

#include <random>
#include <set>
#include <utility>
#include <vector>

#include "harness.h"

namespace torch_lms {
namespace {

TEST(nothing_is_pending_at_first) {
  TransferEpochs epochs;
  CHECK(epochs.over(epochs.begin()));
}

TEST(what_comes_later_does_not_count_for_a_wait) {
  TransferEpochs epochs;
  const uint64_t mine = epochs.add();
  const uint64_t wait = epochs.begin();
  const uint64_t later = epochs.add();
  epochs.finish(later);
  CHECK(!epochs.over(wait));
  CHECK(!epochs.over(epochs.begin()));
  epochs.finish(mine);
  CHECK(epochs.over(wait));
}

/// Against a model: the set of what was unfinished when the wait began.
TEST(a_wait_is_over_when_all_that_was_asked_for_before_it_is) {
  std::mt19937 random(11);
  TransferEpochs epochs;
  struct Wait {
    uint64_t epoch;
    std::set<int> unfinished;
  };
  std::vector<std::pair<int, uint64_t>> transfers;
  std::vector<Wait> waits;
  for (int step = 0; step < 20000; ++step) {
    const unsigned choice = random() % 5;
    if (choice < 2) {
      transfers.emplace_back(step, epochs.add());
    } else if (choice < 4 && !transfers.empty()) {
      const auto at = transfers.begin() + random() % transfers.size();
      epochs.finish(at->second);
      for (Wait& wait : waits) {
        wait.unfinished.erase(at->first);
      }
      transfers.erase(at);
    } else {
      Wait wait{epochs.begin(), {}};
      for (const auto& transfer : transfers) {
        wait.unfinished.insert(transfer.first);
      }
      waits.push_back(wait);
    }
    for (const Wait& wait : waits) {
      REQUIRE(epochs.over(wait.epoch) == wait.unfinished.empty());
    }
    if (waits.size() > 8) {
      waits.erase(waits.begin());
    }
  }
}

} // namespace
} // namespace torch_lms
