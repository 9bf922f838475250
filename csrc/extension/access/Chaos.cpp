#include <extension/access/Chaos.h>

#include <utility>
#include <vector>

#include <extension/base/ForeignCall.h>

namespace torch_lms {
namespace {

constexpr size_t kMostRecipes = 64; // they keep what they read

} // namespace

void Chaos::begin(uint64_t seed, int64_t period) {
  std::lock_guard<std::mutex> lock(mutex_);
  random_.seed(seed);
  period_.store(period);
}

void Chaos::end() {
  period_.store(0);
  std::vector<Made> gone; // destroyed after unlocking
  std::lock_guard<std::mutex> lock(mutex_);
  gone.swap(made_);
}

void Chaos::note_made(
    const EntityPtr& entity,
    const std::shared_ptr<OpRecipe>& recipe,
    size_t output) {
  Made made{entity, recipe, output}; // the one before it is destroyed after unlocking
  std::lock_guard<std::mutex> lock(mutex_);
  if (made_.size() < kMostRecipes) {
    made_.push_back(std::move(made));
  } else {
    std::swap(made_[made_at_++ % kMostRecipes], made);
  }
}

void Chaos::drop_one(uint64_t dice) {
  Made chosen;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (made_.empty()) {
      return;
    }
    std::swap(made_[dice % made_.size()], made_.back());
    chosen = std::move(made_.back());
    made_.pop_back();
  }
  const EntityPtr entity = chosen.entity.lock();
  if (entity != nullptr && !in_foreign_call()) {
    recipes_.drop(entity, chosen.recipe, chosen.output);
  }
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
  if ((dice & 48) == 0) {
    drop_one(dice >> 8);
    return;
  }
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
    pager_.requests().prefetch_ahead(chosen, 0);
  } else if ((dice & 131) == 129) {
    pager_.requests().relocate(chosen, [](const void*) { return true; });
  } else if (pager_.requests().evict(chosen) && (dice & 12) != 0) {
    // Most of them are out before the next op; some race with it.
    pager_.out_queue().wait_for_progress(progress, 10000);
    pager_.commit_finished();
  }
}

} // namespace torch_lms
