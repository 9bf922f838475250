#include <extension/policy/Chaos.h>

#include <vector>

#include <extension/transfer/Pager.h>

namespace torch_lms {

void Chaos::begin(uint64_t seed, int64_t period) {
  std::lock_guard<std::mutex> lock(mutex_);
  random_.seed(seed);
  period_.store(period);
}

void Chaos::end() {
  period_.store(0);
}

void Chaos::strike(uint64_t period) {
  uint64_t dice = 0;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    dice = random_();
  }
  if (dice % period != 0) {
    return;
  }
  dice /= period;
  std::vector<EntityPtr> candidates;
  pager_.table().for_each([&](const EntityPtr& entity) {
    if (!entity->gone() && !entity->pinned()) {
      candidates.push_back(entity);
    }
  });
  if (candidates.empty()) {
    return;
  }
  const EntityPtr& chosen = candidates[(dice >> 8) % candidates.size()];
  const uint64_t progress = pager_.out_queue().progress();
  if ((dice & 3) == 0) {
    pager_.prefetch_ahead(chosen, 0);
  } else if (pager_.evict(chosen) && (dice & 12) != 0) {
    // Most of them are out before the next op; some race with it.
    pager_.out_queue().wait_for_progress(progress, 10000);
    pager_.commit_finished();
  }
}

} // namespace torch_lms
