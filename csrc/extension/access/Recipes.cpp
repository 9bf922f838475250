#include <extension/access/Recipes.h>

#include <algorithm>
#include <utility>

#include <extension/access/IngredientChain.h>
#include <extension/base/Compat.h>
#include <extension/base/ThreadContext.h>

namespace torch_lms {
namespace {

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

bool is_same(const std::weak_ptr<Entity>& one, const EntityPtr& other) {
  return !one.owner_before(other) && !other.owner_before(one);
}

/// From now on raw writes to it are noticed, where PyTorch can tell of them.
void watch_writes(const EntityPtr& entity) {
  if (compat::kHasMaterializer && entity != nullptr) {
    entity->watch_writes();
  }
}

/// Whether nobody else holds the storage that an entity holds.
bool is_last(const KeepAlive& keep) {
  return std::static_pointer_cast<c10::Storage>(keep)->use_count() == 1;
}

/// Of a storage that somebody holds.
c10::weak_intrusive_ptr<c10::StorageImpl> weak(const c10::StorageImpl* storage) {
  return c10::weak_intrusive_ptr<c10::StorageImpl>(
      c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(const_cast<c10::StorageImpl*>(storage)));
}

/// Of what an entity holds; null if that is gone.
const c10::StorageImpl* impl_of(const std::shared_ptr<const void>& keep) {
  return keep != nullptr ? impl_of(*std::static_pointer_cast<const c10::Storage>(keep)) : nullptr;
}

} // namespace

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
  const auto is_dropped = [](const Dropped& one) {
    const EntityPtr entity = one.entity.lock();
    return entity != nullptr && entity->state() == EntityState::kDropped;
  };
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto at = known_.begin(); at != known_.end();) {
    const auto& dropped = at->second.dropped;
    at = std::any_of(dropped.begin(), dropped.end(), is_dropped) ? std::next(at) : known_.erase(at);
  }
  count_.store(known_.size(), std::memory_order_release);
}

/// Under the mutex. `storage`: one that somebody holds, or null.
void Recipes::note_use_locked(const c10::StorageImpl* storage, const OpRecipe& recipe, bool made) {
  if (storage != nullptr) {
    by_storage_.emplace(storage, Use{recipe.id(), made, weak(storage)});
  }
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
    watch_writes(input ? pager_.find(*impl_of(input)) : nullptr);
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
  Known& known = known_[recipe->id()];
  known.recipe = recipe;
  known.op = number_of_op();
  for (const c10::Storage& input : recipe->inputs()) {
    note_use_locked(impl_of(input), *recipe, /*made=*/false);
  }
  // What another thread writes until the end is lost, too.
  note_use_locked(recipe->overwrites(), *recipe, /*made=*/true);
  count_.store(known_.size(), std::memory_order_release);
  return recipe;
}

/// Under the mutex. Whether the recipe has found the one by which what its op overwrites was made
/// until now: the op has ended that one already, or is about to.
bool Recipes::follow_locked(
    OpRecipe& recipe,
    const EntityPtr& overwritten,
    std::vector<std::shared_ptr<OpRecipe>>& garbage) {
  const auto is_it = [&](const auto& made) { return is_same(made, overwritten); };
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
    if (output != known.made.end() && op != nullptr && !op->loose() &&
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
      note_use_locked(impl_of(recipe->inputs()[i]), *recipe, /*made=*/false);
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
    entities.push_back(pager_.find(tensor));
  }
  std::unique_lock<std::mutex> lock(mutex_);
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
    EntityPtr& entity = entities[storages.size() - 1];
    entity = fresh ? entity : nullptr;
    if (looked_after) {
      known->second.made.push_back(entity);
    }
    if (fresh && looked_after && storage != recipe->overwrites()) {
      note_use_locked(storage, *recipe, /*made=*/true);
    }
  }
  lock.unlock();
  std::for_each(entities.begin(), entities.end(), &watch_writes);
  return storages;
}

/// Under the mutex. Dropped storages, each made from the one before and the first one from
/// `storage`; `most` if there are as many, or more.
size_t Recipes::chain_after_locked(const c10::StorageImpl* storage, size_t most, Garbage& garbage) {
  size_t longest = 0;
  const auto readers = by_storage_.equal_range(storage);
  for (auto at = readers.first; at != readers.second && longest < most; ++at) {
    const auto known = known_.find(at->second.recipe);
    if (at->second.made || known == known_.end()) {
      continue;
    }
    for (const Dropped& dropped : known->second.dropped) {
      const EntityPtr entity = dropped.entity.lock();
      garbage.push_back(entity);
      if (entity != nullptr && entity->state() == EntityState::kDropped && longest < most) {
        longest = std::max(longest, 1 + chain_after_locked(dropped.storage, most - 1, garbage));
      }
    }
  }
  return longest;
}

/// Under the mutex. Ops that run, one after another, until what `recipe` makes is there again;
/// `most` if there are as many, or more.
size_t Recipes::chain_before_locked(const OpRecipe& recipe, size_t most, Garbage& garbage) {
  size_t longest = 1;
  for (const c10::Storage& input : recipe.inputs()) {
    const EntityPtr entity = input ? pager_.find(*impl_of(input)) : nullptr;
    garbage.push_back(entity);
    if (entity == nullptr || entity->state() != EntityState::kDropped || longest >= most) {
      continue;
    }
    const auto at = of_dropped_.find(entity.get());
    const auto made_again = at != of_dropped_.end() ? at->second.lock() : nullptr;
    garbage.push_back(made_again);
    longest =
        made_again == nullptr
            ? most
            : std::max(longest, 1 + chain_before_locked(*made_again->op(), most - 1, garbage));
  }
  return std::min(longest, most);
}

bool Recipes::drop(
    const EntityPtr& entity,
    const std::shared_ptr<OpRecipe>& recipe,
    size_t output) {
  constexpr size_t kLongChain = 5; // each of them has room at once
  Garbage garbage;
  const std::shared_ptr<const OpRecipe> op = OpRecipe::held(recipe);
  // From before the mutex until after it: see the class. What nobody else holds is about to go.
  const KeepAlive keep = entity->hold();
  const c10::StorageImpl* const storage = impl_of(keep);
  if (op == nullptr || storage == nullptr || is_last(keep)) {
    return false;
  }
  auto made_again = std::make_shared<DroppedOutput>(pager_, recipe, op, output, entity->nbytes());
  // Under the mutex, so that who is about to write finds either nothing dropped or all of it.
  std::lock_guard<std::mutex> lock(mutex_);
  const auto known = known_.find(recipe->id());
  if (known == known_.end() || !recipe->valid()) {
    return false;
  }
  // Nobody has planned what has to be there at once when it is made again.
  if (recipe->loose() && chain_before_locked(*op, kLongChain, garbage) +
                                 chain_after_locked(storage, kLongChain, garbage) >=
                             kLongChain) {
    return false;
  }
  auto& dropped = known->second.dropped; // now or earlier
  const auto is_it = [&](const Dropped& one) { return is_same(one.entity, entity); };
  if (std::none_of(dropped.begin(), dropped.end(), is_it)) {
    dropped.push_back({entity, storage});
  }
  std::weak_ptr<DroppedOutput>& of_dropped = of_dropped_[entity.get()];
  const std::weak_ptr<DroppedOutput> before = std::exchange(of_dropped, made_again);
  if (!pager_.requests().drop(entity, made_again)) {
    of_dropped = before; // it may be dropped already
    return false;
  }
  return true;
}

/// Under the mutex: the op of this number, or what is none, is about to write to what `recipe`
/// makes. False for the recipe's own op. Who writes while another has not ended yet makes nothing
/// that could be made again in turn: both end the recipe, and neither follows it.
bool Recipes::Known::end(const OpRecipe& ours, uint64_t by) {
  if (op != 0 && op == by) {
    return false;
  }
  const bool first = ours.valid() && !made.empty();
  ended_by = first || ended_by == by ? by : 0;
  return true;
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
      } else if (!known->second.end(*recipe, number_of_op())) {
        continue;
      }
      recipe->invalidate();
      // Also where another thread has, and still reads this storage to bring them back.
      for (const Dropped& one : known->second.dropped) {
        if (EntityPtr entity = one.entity.lock()) {
          dropped.push_back(std::move(entity));
        }
      }
    }
  }
  for (const EntityPtr& entity : dropped) {
    const KeepAlive storage = entity->hold(); // it may be another thread's, who lets go of it
    const EntityState now = entity->state();
    // What is back already may be made only now, on another stream than the write's.
    const bool comes = now == EntityState::kDropped || now == EntityState::kPagingIn ||
                       (now == EntityState::kResident && !entity->settled());
    if (storage != nullptr && comes) {
      pager_.bring_in(entity);
    }
  }
}

std::shared_ptr<DroppedOutput> Recipes::recipe_of(const EntityPtr& entity) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto at = of_dropped_.find(entity.get());
  return at == of_dropped_.end() ? nullptr : at->second.lock();
}

/// What has been dropped, and is needed to make `entity` again.
std::vector<EntityPtr> Recipes::dropped_ingredients(const EntityPtr& entity) {
  std::vector<EntityPtr> dropped;
  const std::shared_ptr<DroppedOutput> recipe = recipe_of(entity);
  if (recipe == nullptr || entity->state() != EntityState::kDropped) {
    return dropped;
  }
  for (const c10::Storage& input : recipe->op()->inputs()) {
    EntityPtr needed = input ? pager_.find(*impl_of(input)) : nullptr;
    if (needed != nullptr && needed != entity && needed->state() == EntityState::kDropped) {
      dropped.push_back(std::move(needed));
    }
  }
  return dropped;
}

void Recipes::bring_ingredients(const EntityPtr& entity) {
  IngredientChain chain(pager_, [this](const EntityPtr& of) { return dropped_ingredients(of); });
  chain.bring(entity);
}

} // namespace torch_lms
