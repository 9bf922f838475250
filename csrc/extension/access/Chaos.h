#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <random>
#include <vector>

#include <extension/access/Recipes.h>

namespace torch_lms {

/// For tests: moves storages at random between ops, whatever the program does. Results
/// must be the same with it as without.
///
/// Thread-safe: every method may be called from any thread.
class Chaos {
 public:
  Chaos(Pager& pager, Recipes& recipes) : pager_(pager), recipes_(recipes) {}

  /// From now on, after one op in `period` (at random), one entity goes out, comes back or is
  /// dropped.
  void begin(uint64_t seed, int64_t period);
  void end();

  /// Whether an op that begins is to leave its recipe.
  bool wants_recipe() const noexcept {
    return period_.load(std::memory_order_relaxed) != 0;
  }
  /// It has made `entity` as its `output`-th tensor.
  void note_made(const EntityPtr& entity, const std::shared_ptr<OpRecipe>& recipe, size_t output);

  /// An outermost op of the calling thread has ended.
  void after_op() {
    if (const int64_t period = period_.load(std::memory_order_relaxed)) {
      strike(static_cast<uint64_t>(period));
    }
  }

 private:
  struct Made {
    std::weak_ptr<Entity> entity;
    std::shared_ptr<OpRecipe> recipe;
    size_t output;
  };
  void strike(uint64_t period);
  void drop_one(uint64_t dice);

  Pager& pager_;
  Recipes& recipes_;
  std::atomic<int64_t> period_{0};
  std::mutex mutex_; // guards what follows; nothing is called under it
  std::mt19937_64 random_;
  std::vector<Made> made_; // the latest
  size_t made_at_ = 0;
};

} // namespace torch_lms
