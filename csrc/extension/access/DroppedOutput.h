#pragma once

#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include <c10/core/StreamGuard.h>
#include <c10/util/Exception.h>
#include <entity/Recipe.h>

#include <extension/access/Ingredients.h>
#include <extension/access/OpRecipe.h>
#include <extension/transfer/Pager.h>

namespace torch_lms {

/// One output of an op, while it is dropped: how its entity makes it again (Note [Recipes]).
///
/// Thread-safe: every method may be called from any thread. `make` runs ops, and waits as
/// `Pager::use`; `op` blocks on nothing.
class DroppedOutput final : public Recipe {
 public:
  /// `known`: as which `Recipes` knows `op`.
  DroppedOutput(
      Pager& pager,
      std::shared_ptr<const OpRecipe> known,
      std::shared_ptr<const OpRecipe> op,
      size_t output,
      size_t nbytes)
      : pager_(pager),
        known_(std::move(known)),
        op_(std::move(op)),
        output_(output),
        nbytes_(nbytes) {}

  std::unique_ptr<DeviceBlock> make(FencePtr* done) override {
    ActionTimes::Timer timer(pager_.action_times(), Action::kRecompute);
    timer.count();
    const c10::OptionalStreamGuard on_stream(op_->stream()); // which waits for what comes in, too
    Ingredients ingredients(pager_);
    for (const c10::Storage& input : op_->inputs()) {
      const EntityPtr entity = input ? pager_.find(*input.unsafeGetStorageImpl()) : nullptr;
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

  /// It keeps its inputs alive.
  const std::shared_ptr<const OpRecipe>& op() const noexcept {
    return op_;
  }

 private:
  Pager& pager_;
  const std::shared_ptr<const OpRecipe> known_; // lives, so that writes to what it reads are seen
  const std::shared_ptr<const OpRecipe> op_;
  const size_t output_;
  const size_t nbytes_;
};

} // namespace torch_lms
