#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include <extension/access/DroppedOutput.h>
#include <extension/access/OpRecipe.h>
#include <extension/transfer/Pager.h>

namespace torch_lms {

/// The recipes of this process, found by the storages that they read and that they have made:
/// drops storages, makes them again in the right order, and keeps what they are made from as it
/// was. See Note [Recipes].
///
/// Thread-safe: every method may be called from any thread, with and without the GIL.
/// `before_write` and `bring_ingredients` run ops and wait as `Pager::use`; the others block on a
/// mutex, under which `drop` asks for entities and drops one. Nobody needs Python's lock under it:
/// what holds a storage, or lets go of one, does so before or afterwards.
class Recipes {
 public:
  explicit Recipes(Pager& pager);

  /// An op that begins, as a recipe: what it reads is looked after from now on, where PyTorch can
  /// tell of raw writes also these, unless it is only `to_look_at`. Null if it cannot be run again,
  /// or overwrites what no recipe has made; one `to_look_at` has no earlier one and cannot be run.
  std::shared_ptr<OpRecipe> capture(const at::RecordFunction& record, bool to_look_at = false);

  /// The op has ended and made `made`. False if it cannot be run again after all. To be called
  /// before the recipe is tried out or noted.
  bool finish(const std::shared_ptr<OpRecipe>& recipe, const std::vector<at::Tensor>& made);

  /// What the op has made, of which those are left that can be dropped: the rest is
  /// null. Their place in the list is what `drop` takes. These are looked after from now on, too:
  /// they may be written to before they are dropped.
  std::vector<c10::StorageImpl*> note_made(
      const std::shared_ptr<OpRecipe>& recipe,
      const std::vector<at::Tensor>& made);

  /// RESIDENT -> DROPPED, for what `recipe` has made as its `output`-th tensor. Returns false if it
  /// stays: in use, or written since. Also, by a loose recipe: what it is made from has gone, or to
  /// make it again would take a long chain of ops.
  bool drop(const EntityPtr& entity, const std::shared_ptr<OpRecipe>& recipe, size_t output);

  /// Somebody is about to write to a storage. What has been dropped and depends on its bytes comes
  /// back first. Cheap while there are no recipes.
  void before_write(const c10::StorageImpl& storage) {
    if (any()) {
      invalidate_readers(storage);
    }
  }

  /// Ops are not observed any more: what has not been dropped by now will not be, since nobody
  /// tells who writes to it.
  void forget();

  bool any() const noexcept {
    return count_.load(std::memory_order_acquire) != 0;
  }

 private:
  bool reads_only_ours(const OpRecipe& recipe);
  void look_after(const OpRecipe& recipe);
  bool follow_locked(
      OpRecipe& recipe,
      const EntityPtr& overwritten,
      std::vector<std::shared_ptr<OpRecipe>>& garbage);
  std::vector<EntityPtr> dropped_ingredients(const EntityPtr& entity);
  void bring_ingredients(const EntityPtr& entity);
  void invalidate_readers(const c10::StorageImpl& storage);
  std::shared_ptr<DroppedOutput> recipe_of(const EntityPtr& entity);

  /// What is let go of after unlocking.
  using Garbage = std::vector<std::shared_ptr<const void>>;
  size_t chain_before_locked(const OpRecipe& recipe, size_t most, Garbage& garbage);
  size_t chain_after_locked(const c10::StorageImpl* storage, size_t most, Garbage& garbage);

  /// The storage is to be compared only: its entity keeps the address.
  struct Dropped {
    std::weak_ptr<Entity> entity;
    const c10::StorageImpl* storage;
  };
  /// One op's, with what it has made, and what has been dropped of that.
  struct Known {
    std::weak_ptr<OpRecipe> recipe;
    std::vector<std::weak_ptr<Entity>> made; // as in the op's list of tensors
    std::vector<Dropped> dropped;
    uint64_t op = 0; // whose recipe it is, by number; as long as it runs, it may write to its own
    bool spoilt = false; // what it reads has been written since
    uint64_t ended_by = 0; // the op that alone has written to what it made, by number
    bool end(const OpRecipe& ours, uint64_t by);
  };
  /// By whose recipe a storage is read or has been made.
  struct Use {
    uint64_t recipe; // by its id
    bool made;
    c10::weak_intrusive_ptr<c10::StorageImpl> keeps_address; // once it has died, no other has it
  };
  void note_use_locked(const c10::StorageImpl* storage, const OpRecipe& recipe, bool made);
  void forget_dead_locked();

  Pager& pager_;
  std::mutex mutex_; // guards what follows
  std::unordered_map<uint64_t, Known> known_; // by the recipe's id
  std::unordered_multimap<const c10::StorageImpl*, Use> by_storage_;
  std::unordered_map<const Entity*, std::weak_ptr<DroppedOutput>> of_dropped_;
  size_t forget_at_ = 1024; // entries of `by_storage_`
  std::atomic<size_t> count_{0};
};

} // namespace torch_lms
