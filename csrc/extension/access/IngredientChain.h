#pragma once

#include <functional>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include <extension/access/Ingredients.h>
#include <extension/transfer/Pager.h>

namespace torch_lms {

/// What a dropped storage is made from, where that has been dropped, too.
///
/// Without recursion: a chain may be as long as the program. What lies between is let go of as soon
/// as all that the chain makes from it has been made, as plans count on, and not before: each is
/// made once, though others drop what nobody holds.
///
/// Not thread-safe: an object of one call. `bring` runs ops, and waits as `Pager::use`.
class IngredientChain {
 public:
  /// `dropped_ingredients`: what an entity is made from directly, of that what is dropped.
  IngredientChain(
      Pager& pager,
      std::function<std::vector<EntityPtr>(const EntityPtr&)> dropped_ingredients)
      : pager_(pager), dropped_ingredients_(std::move(dropped_ingredients)) {}

  /// Afterwards what `entity` is made from directly is on the device, unless memory is short
  /// already. Throws what an op throws. To be called once.
  void bring(const EntityPtr& entity) {
    begin(entity);
    while (chain_.size() > 1 || !chain_.back()->left.empty()) {
      Making& last = *chain_.back();
      if (last.left.empty()) {
        keeper_of(last.entity).ingredients.bring(last.entity);
        askers_.erase(last.entity.get());
        chain_.pop_back();
      } else {
        const EntityPtr next = std::move(last.left.back());
        last.left.pop_back();
        begin(next);
      }
    }
  }

 private:
  /// What is to be made again, and what of that has come.
  struct Making {
    Making(Pager& pager, EntityPtr entity, std::vector<EntityPtr> dropped)
        : entity(std::move(entity)), left(std::move(dropped)), ingredients(pager) {}

    EntityPtr entity;
    std::vector<EntityPtr> left; // of what it is made from; the next one is the last
    Ingredients ingredients;
  };

  void begin(const EntityPtr& next) {
    chain_.push_back(std::make_unique<Making>(pager_, next, dropped_ingredients_(next)));
    for (const EntityPtr& needed : chain_.back()->left) {
      askers_.emplace(needed.get(), chain_.back().get());
    }
  }

  /// Who needs the last of the chain for longest.
  Making& keeper_of(const EntityPtr& entity) {
    const auto asker = askers_.find(entity.get());
    return asker != askers_.end() ? *asker->second : *chain_[chain_.size() - 2];
  }

  Pager& pager_;
  const std::function<std::vector<EntityPtr>(const EntityPtr&)> dropped_ingredients_;
  std::vector<std::unique_ptr<Making>> chain_; // each is needed by the one before it
  std::unordered_map<const Entity*, Making*> askers_; // the first one, which is made last
};

} // namespace torch_lms
