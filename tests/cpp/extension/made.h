#pragma once

#include <functional>
#include <utility>

#include <ATen/record_function.h>

#include "rig.h"

// Storages that ops have made, with their recipes.

/// Ops are observed from before anything is dropped.
struct Observed {
  Settled settled;
  torch_lms::OpCallbacks::Request request{lms().callbacks};
};

inline int64_t recomputations() {
  return lms().pager.stats().recomputations.load();
}

struct Made {
  at::Tensor tensor;
  torch_lms::EntityPtr entity;
  std::shared_ptr<torch_lms::OpRecipe> recipe;

  bool drop() const {
    return recipe != nullptr && lms().recipes.drop(entity, recipe, 0);
  }
};

/// Takes the recipe of the calling thread's next op.
class NextRecipe {
 public:
  NextRecipe()
      : handle_(
            at::addThreadLocalCallback(
                at::RecordFunctionCallback(&begin, &end)
                    .needsInputs(true)
                    .scopes({at::RecordScope::FUNCTION}))) {
    depth() = 0;
    recipe() = nullptr;
  }
  ~NextRecipe() {
    at::removeCallback(handle_);
    recipe() = nullptr;
    see() = nullptr;
    before() = nullptr;
  }
  NextRecipe(const NextRecipe&) = delete;
  NextRecipe& operator=(const NextRecipe&) = delete;

  /// Before it is taken: the op has announced what it writes to.
  void before_capture(std::function<void()> act) {
    before() = std::move(act);
  }

  /// Shows it before the op begins.
  void at_begin(std::function<void(const torch_lms::OpRecipe&)> see_it) {
    see() = std::move(see_it);
  }

  std::shared_ptr<torch_lms::OpRecipe> take() {
    return std::exchange(recipe(), nullptr);
  }

 private:
  static int& depth() {
    static thread_local int depth = 0;
    return depth;
  }
  static std::shared_ptr<torch_lms::OpRecipe>& recipe() {
    static thread_local std::shared_ptr<torch_lms::OpRecipe> recipe;
    return recipe;
  }
  static std::function<void(const torch_lms::OpRecipe&)>& see() {
    static thread_local std::function<void(const torch_lms::OpRecipe&)> see;
    return see;
  }
  static std::function<void()>& before() {
    static thread_local std::function<void()> before;
    return before;
  }
  static std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& record) {
    if (depth()++ == 0) {
      if (before() != nullptr) {
        before()();
      }
      recipe() = lms().recipes.capture(record);
      if (recipe() != nullptr && see() != nullptr) {
        see()(*recipe());
      }
    }
    return nullptr;
  }
  static void end(const at::RecordFunction&, at::ObserverContext*) {
    --depth();
  }

  const at::CallbackHandle handle_;
};

/// What one op makes; `prepare` is told of what takes its recipe.
template <typename Op>
Made made_by(Op&& op, const std::function<void(NextRecipe&)>& prepare = nullptr) {
  Made made;
  {
    NextRecipe next;
    if (prepare != nullptr) {
      prepare(next);
    }
    made.tensor = op();
    made.recipe = next.take();
  }
  c10::StorageImpl& storage = *made.tensor.storage().unsafeGetStorageImpl();
  made.entity = lms().pager.find_or_track(storage, torch_lms::FoundBy::kHand);
  if (made.recipe != nullptr && lms().recipes.note_made(made.recipe, {made.tensor})[0] == nullptr) {
    made.recipe = nullptr;
  }
  return made;
}

/// What its op made, then written by another op in place.
template <typename Op>
Made then(const Made& made, Op&& op) {
  return made_by([&] { return op(made.tensor); });
}

/// Its recipe keeps nothing alive before it is dropped.
template <typename Op>
Made made_loosely_by(Op&& op) {
  Made made = made_by(std::forward<Op>(op));
  made.recipe->loosen();
  return made;
}
