#include <extension/access/Recipes.h>

#include <algorithm>
#include <utility>

#include <entity/Error.h>

#include <extension/access/KeptWatch.h>
#include <extension/base/Compat.h>
#include <extension/base/ThreadContext.h>

namespace torch_lms {
namespace {

/// Storages whose bytes are on the device, and stay there.
class Ingredients {
 public:
  explicit Ingredients(Pager& pager) : pager_(pager) {}
  ~Ingredients() {
    kept_watch_.end();
    for (const EntityPtr& entity : served_) {
      entity->end_service();
    }
    for (const EntityPtr& entity : pinned_) {
      entity->unpin();
    }
  }
  Ingredients(const Ingredients&) = delete;
  Ingredients& operator=(const Ingredients&) = delete;

  void bring(const EntityPtr& entity) {
    pinned_.reserve(pinned_.size() + 1);
    served_.reserve(served_.size() + 1);
    storages_.push_back(entity->hold());
    if (storages_.back() == nullptr) {
      return; // what it was for has been made, or is gone, too
    }
    entity->pin(); // before it comes in: making room for it must not push it out
    pinned_.push_back(entity);
    const Place place = pager_.use(entity);
    if (place == Place::kHost) {
      served_.push_back(entity);
    } else if (place == Place::kNowhere) {
      throw Error("expected what a dropped storage is made from, found that it cannot be made");
    }
    kept_watch_.add(*entity);
  }

 private:
  Pager& pager_;
  std::vector<KeepAlive> storages_;
  std::vector<EntityPtr> pinned_;
  std::vector<EntityPtr> served_;
  KeptWatch kept_watch_;
};

/// The outermost op that the calling thread runs. 0: none.
uint64_t number_of_op() {
  static std::atomic<uint64_t> last{0};
  ThreadContext& thread = this_thread();
  if (thread.op != nullptr && thread.op_number == 0) {
    thread.op_number = last.fetch_add(1, std::memory_order_relaxed) + 1;
  }
  return thread.op != nullptr ? thread.op_number : 0;
}

c10::StorageImpl* impl_of(const c10::Storage& storage) {
  return storage ? storage.unsafeGetStorageImpl() : nullptr;
}

} // namespace

/// One output of an op, while it is dropped.
class Recipes::Storage final : public Recipe {
 public:
  Storage(Pager& pager, std::shared_ptr<OpRecipe> op, size_t output, size_t nbytes)
      : pager_(pager), op_(std::move(op)), output_(output), nbytes_(nbytes) {}

  std::unique_ptr<DeviceBlock> make(FencePtr* done) override {
    ActionTimes::Timer timer(pager_.action_times(), Action::kRecompute);
    timer.count();
    Ingredients ingredients(pager_);
    for (const c10::Storage& input : op_->inputs()) {
      const EntityPtr entity = input ? pager_.find(*impl_of(input)) : nullptr;
      if (entity != nullptr) {
        ingredients.bring(entity);
      }
    }
    const std::vector<at::Tensor> made = op_->run();
    TORCH_CHECK(output_ < made.size() && made[output_].defined(), "the op made something else");
    c10::StorageImpl& fresh = *made[output_].storage().unsafeGetStorageImpl();
    TORCH_CHECK(
        fresh.nbytes() == nbytes_, "expected ", nbytes_, " bytes again, found ", fresh.nbytes());
    if (Device* device = pager_.devices().known(fresh.device())) {
      *done = device->backend()->submitted_work(); // on another stream than the caller's, perhaps
    }
    return std::make_unique<TorchDeviceBlock>(
        fresh.set_data_ptr(c10::DataPtr(nullptr, fresh.device())));
  }

  const std::shared_ptr<OpRecipe>& op() const noexcept {
    return op_;
  }

 private:
  Pager& pager_;
  const std::shared_ptr<OpRecipe> op_;
  const size_t output_;
  const size_t nbytes_;
};

Recipes::Recipes(Pager& pager) : pager_(pager) {
  pager_.set_bring_ingredients([this](const EntityPtr& entity) { bring_ingredients(entity); });
}

/// Under the mutex.
void Recipes::forget_dead_locked() {
  if (by_storage_.size() < forget_at_) {
    return;
  }
  for (auto at = by_storage_.begin(); at != by_storage_.end();) {
    const auto known = known_.find(at->second.recipe);
    at = known == known_.end() || known->second.recipe.expired() ? by_storage_.erase(at)
                                                                 : std::next(at);
  }
  for (auto at = known_.begin(); at != known_.end();) {
    at = at->second.recipe.expired() ? known_.erase(at) : std::next(at);
  }
  for (auto at = of_dropped_.begin(); at != of_dropped_.end();) {
    at = at->second.expired() ? of_dropped_.erase(at) : std::next(at);
  }
  forget_at_ = std::max<size_t>(1024, 2 * by_storage_.size());
  count_.store(known_.size(), std::memory_order_release);
}

void Recipes::forget() {
  const auto is_dropped = [](const std::weak_ptr<Entity>& weak) {
    const EntityPtr entity = weak.lock();
    return entity != nullptr && entity->state() == EntityState::kDropped;
  };
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto at = known_.begin(); at != known_.end();) {
    const auto& dropped = at->second.dropped;
    at = std::any_of(dropped.begin(), dropped.end(), is_dropped) ? std::next(at) : known_.erase(at);
  }
  count_.store(known_.size(), std::memory_order_release);
}

/// Whether nobody but ops can write to what the recipe reads.
bool Recipes::reads_only_ours(const OpRecipe& recipe) {
  for (const c10::Storage& input : recipe.inputs()) {
    if (!input) {
      continue;
    }
    const EntityPtr entity = pager_.find(*impl_of(input));
    const Device* device = pager_.devices().find(input.device());
    const bool resident = entity == nullptr || entity->state() == EntityState::kResident;
    const bool owned =
        device != nullptr && (device->owns(impl_of(input)->_mutable_data_ptr_no_checks()) ||
                              (entity != nullptr && compat::block_is_watched(*impl_of(input))));
    const bool ours = (entity == nullptr || !entity->fixed()) && (owned || !resident);
    if (!ours) {
      return false;
    }
  }
  return true;
}

/// From now on raw writes to what it reads are noticed, where PyTorch can tell of them.
void Recipes::look_after(const OpRecipe& recipe) {
  for (const c10::Storage& input : recipe.inputs()) {
    const EntityPtr entity =
        compat::kHasMaterializer && input ? pager_.find(*impl_of(input)) : nullptr;
    if (entity != nullptr) {
      entity->watch_writes();
    }
  }
}

std::shared_ptr<OpRecipe> Recipes::capture(const at::RecordFunction& record, bool to_look_at) {
  std::shared_ptr<OpRecipe> recipe = OpRecipe::capture(record);
  if (recipe == nullptr || !reads_only_ours(*recipe)) {
    return nullptr;
  }
  if (to_look_at) {
    return recipe;
  }
  look_after(*recipe);
  const EntityPtr overwritten =
      recipe->overwrites() != nullptr ? pager_.find(*recipe->overwrites()) : nullptr;
  std::vector<std::shared_ptr<OpRecipe>> garbage; // destroyed after unlocking
  std::lock_guard<std::mutex> lock(mutex_);
  if (recipe->overwrites() != nullptr && !follow_locked(*recipe, overwritten, garbage)) {
    return nullptr;
  }
  forget_dead_locked();
  known_[recipe->id()].recipe = recipe;
  for (const c10::Storage& input : recipe->inputs()) {
    by_storage_.emplace(impl_of(input), Use{recipe->id(), false});
  }
  count_.store(known_.size(), std::memory_order_release);
  return recipe;
}

/// Under the mutex. Whether the recipe has found the one by which what its op overwrites was made
/// until now: the op has ended that one already, or is about to.
bool Recipes::follow_locked(
    OpRecipe& recipe,
    const EntityPtr& overwritten,
    std::vector<std::shared_ptr<OpRecipe>>& garbage) {
  const auto is_it = [&overwritten](const std::weak_ptr<Entity>& made) {
    return !made.owner_before(overwritten) && !overwritten.owner_before(made);
  };
  const auto earlier = by_storage_.equal_range(recipe.overwrites());
  for (auto at = earlier.first; overwritten != nullptr && at != earlier.second; ++at) {
    const auto found = known_.find(at->second.recipe);
    if (!at->second.made || found == known_.end() || found->second.spoilt) {
      continue;
    }
    const Known& known = found->second;
    const auto output = std::find_if(known.made.begin(), known.made.end(), is_it);
    garbage.push_back(known.recipe.lock());
    const std::shared_ptr<OpRecipe>& op = garbage.back();
    if (output != known.made.end() && op != nullptr &&
        (op->valid() || (known.ended_by != 0 && known.ended_by == number_of_op()))) {
      return recipe.follow(op, static_cast<size_t>(output - known.made.begin()));
    }
  }
  return false;
}

bool Recipes::finish(const std::shared_ptr<OpRecipe>& recipe, const std::vector<at::Tensor>& made) {
  const size_t before = recipe->inputs().size();
  if (!recipe->finish(made)) {
    return false;
  }
  if (recipe->inputs().size() == before) {
    return true;
  }
  bool looked_after = false;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    looked_after = known_.count(recipe->id()) != 0;
    for (size_t i = before; looked_after && i < recipe->inputs().size(); ++i) {
      by_storage_.emplace(impl_of(recipe->inputs()[i]), Use{recipe->id(), false});
    }
  }
  if (looked_after) {
    look_after(*recipe);
  }
  return reads_only_ours(*recipe);
}

std::vector<c10::StorageImpl*> Recipes::note_made(
    const std::shared_ptr<OpRecipe>& recipe,
    const std::vector<at::Tensor>& made) {
  const auto& inputs = recipe->inputs();
  std::vector<c10::StorageImpl*> storages;
  std::vector<EntityPtr> entities;
  for (const at::Tensor& tensor : made) {
    const bool there = tensor.defined() && tensor.has_storage();
    entities.push_back(there ? pager_.find(*impl_of(tensor.storage())) : nullptr);
  }
  std::lock_guard<std::mutex> lock(mutex_);
  const auto known = known_.find(recipe->id());
  const bool looked_after = known != known_.end();
  for (const at::Tensor& tensor : made) {
    c10::StorageImpl* storage = tensor.defined() && tensor.has_storage()
                                    ? tensor.storage().unsafeGetStorageImpl()
                                    : nullptr;
    const bool fresh = storage != nullptr && tensor.layout() == at::kStrided &&
                       (tensor.storage_offset() == 0 || storage == recipe->overwrites()) &&
                       std::find(storages.begin(), storages.end(), storage) == storages.end() &&
                       std::none_of(inputs.begin(), inputs.end(), [&](const auto& input) {
                         return impl_of(input) == storage;
                       });
    storages.push_back(fresh ? storage : nullptr);
    if (looked_after) {
      known->second.made.push_back(fresh ? entities[storages.size() - 1] : nullptr);
    }
    if (fresh && looked_after) {
      by_storage_.emplace(storage, Use{recipe->id(), true});
    }
  }
  return storages;
}

bool Recipes::drop(
    const EntityPtr& entity,
    const std::shared_ptr<OpRecipe>& recipe,
    size_t output) {
  auto made_again = std::make_shared<Storage>(pager_, recipe, output, entity->nbytes());
  // Under the mutex, so that who is about to write finds either nothing dropped or all of it.
  std::lock_guard<std::mutex> lock(mutex_);
  const auto known = known_.find(recipe->id());
  if (known == known_.end() || !recipe->valid()) {
    return false;
  }
  known->second.dropped.push_back(entity);
  of_dropped_[entity.get()] = made_again;
  return pager_.requests().drop(entity, made_again);
}

void Recipes::invalidate_readers(const c10::StorageImpl& storage) {
  std::vector<std::shared_ptr<OpRecipe>> recipes; // let go of without the mutex
  std::vector<EntityPtr> dropped;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto readers = by_storage_.equal_range(&storage);
    for (auto at = readers.first; at != readers.second; ++at) {
      const auto known = known_.find(at->second.recipe);
      auto recipe = known != known_.end() ? known->second.recipe.lock() : nullptr;
      if (recipe == nullptr) {
        continue;
      }
      recipes.push_back(recipe);
      if (!at->second.made) {
        known->second.spoilt = true;
      } else if (recipe->valid()) {
        known->second.ended_by = number_of_op();
      }
      if (!recipe->valid()) {
        continue;
      }
      recipe->invalidate();
      for (const auto& weak : known->second.dropped) {
        if (EntityPtr entity = weak.lock()) {
          dropped.push_back(std::move(entity));
        }
      }
    }
  }
  for (const EntityPtr& entity : dropped) {
    const KeepAlive storage = entity->hold(); // it may be another thread's, who lets go of it
    const EntityState now = entity->state();
    if (storage != nullptr && (now == EntityState::kDropped || now == EntityState::kPagingIn)) {
      entity->pin();
      if (pager_.use(entity) == Place::kHost) {
        entity->end_service();
      }
      entity->unpin();
    }
  }
}

std::shared_ptr<Recipes::Storage> Recipes::recipe_of(const EntityPtr& entity) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto at = of_dropped_.find(entity.get());
  return at == of_dropped_.end() ? nullptr : at->second.lock();
}

/// Without recursion: a chain may be as long as the program. Afterwards what `entity` is made from
/// directly is on the device, unless memory is short already.
void Recipes::bring_ingredients(const EntityPtr& entity) {
  Ingredients ingredients(pager_);
  std::vector<EntityPtr> wanted{entity};
  while (!wanted.empty()) {
    const EntityPtr next = wanted.back();
    const std::shared_ptr<Storage> recipe = recipe_of(next);
    const size_t depth = wanted.size();
    if (recipe != nullptr && next->state() == EntityState::kDropped) {
      for (const c10::Storage& input : recipe->op()->inputs()) {
        const EntityPtr needed = input ? pager_.find(*impl_of(input)) : nullptr;
        if (needed != nullptr && needed != next && needed->state() == EntityState::kDropped) {
          wanted.push_back(needed);
        }
      }
    }
    if (wanted.size() > depth) {
      continue;
    }
    wanted.pop_back();
    if (next != entity) {
      ingredients.bring(next);
    }
  }
}

} // namespace torch_lms
