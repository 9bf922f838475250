#include <extension/access/DropsOnDemand.h>

#include <algorithm>
#include <utility>
#include <vector>

#include <extension/base/ThreadContext.h>

namespace torch_lms {

void DropsOnDemand::allow(bool allowed) {
  allowed_.store(allowed, std::memory_order_relaxed);
  end();
  if (allowed) {
    return;
  }
  MadeByEntity forgotten; // destroyed after unlocking
  std::lock_guard<std::mutex> lock(mutex_);
  forgotten.swap(made_);
}

void DropsOnDemand::begin() {
  if (!on() && allowed_.load(std::memory_order_relaxed)) {
    on_.store(true, std::memory_order_relaxed);
  }
}

void DropsOnDemand::begin_op(const at::RecordFunction& record, Frame& frame) {
  if (!frame.sealed) {
    return;
  }
  frame.loose_recipe = recipes_.capture(record);
  if (frame.loose_recipe != nullptr && frame.loose_recipe->overwrites() != nullptr) {
    frame.loose_recipe = nullptr; // the earlier recipe would have to keep what it reads
  }
}

void DropsOnDemand::end_op(const at::RecordFunction& record, Frame& frame) {
  const std::shared_ptr<OpRecipe> recipe = std::move(frame.loose_recipe);
  if (recipe == nullptr) {
    return;
  }
  const std::vector<at::Tensor> made = tensors_in(outputs_of(record));
  if (!recipes_.finish(recipe, made) ||
      !audition_.try_out(*recipe, made, /*before=*/c10::Storage()).empty()) {
    return;
  }
  const std::vector<c10::StorageImpl*> fresh = recipes_.note_made(recipe, made);
  recipe->loosen();
  for (size_t i = 0; i < fresh.size(); ++i) {
    const EntityPtr entity = fresh[i] != nullptr ? pager_.find(*fresh[i]) : nullptr;
    if (entity != nullptr) {
      note(entity, Made{entity, recipe, i});
    }
  }
}

void DropsOnDemand::note(const EntityPtr& entity, Made made) {
  std::vector<Made> dead; // destroyed after unlocking
  std::lock_guard<std::mutex> lock(mutex_);
  std::swap(made_[entity.get()], made);
  if (made_.size() < sweep_at_) {
    return;
  }
  for (auto at = made_.begin(); at != made_.end();) {
    const EntityPtr known = at->second.entity.lock();
    if (known == nullptr || known->gone()) {
      dead.push_back(std::move(at->second));
      at = made_.erase(at);
    } else {
      ++at;
    }
  }
  sweep_at_ = std::max<size_t>(1024, 2 * made_.size());
}

bool DropsOnDemand::drop(const EntityPtr& entity) {
  if (entity->pinned() || this_thread().undropping) {
    return false;
  }
  Made made;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto at = made_.find(entity.get());
    if (at == made_.end()) {
      return false;
    }
    made = at->second;
  }
  return made.entity.lock() == entity && recipes_.drop(entity, made.recipe, made.output);
}

} // namespace torch_lms
