#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <unordered_map>

#include <ATen/record_function.h>

#include <extension/access/Audition.h>
#include <extension/access/Frame.h>
#include <extension/access/Recipes.h>

namespace torch_lms {

/// Note [A host that fills]
/// Until there is a plan, and where one errs, what does not fit the device goes to the host. The
/// host may have less room than such a step needs, where a plan, which drops storages too, needs
/// little. So when half of the host's room is taken, ops begin to leave their recipes (from a
/// quarter on, where what is left would not take all that is on the device and has none), and when
/// three quarters are, what has one is dropped rather than copied out. The last quarter is for what
/// has none.
///
/// Nobody has planned what these recipes keep alive, so until a storage is dropped its recipe keeps
/// nothing: what is made from something that has died meanwhile stays, or is copied out. Of a chain
/// of storages that are each made from the one before, some stay, so that the way back is short.

/// Drops storages that no plan names, instead of paging them out.
///
/// Thread-safe: every method may be called from any thread. `begin_op` and `end_op` are called on
/// the op's thread, with its frame; `end_op` runs an op (`Audition`). The others block on nothing
/// but mutexes.
class DropsOnDemand {
 public:
  DropsOnDemand(Pager& pager, Recipes& recipes, Audition& audition)
      : pager_(pager), recipes_(recipes), audition_(audition) {}

  /// Whether the user lets storages be dropped at all, once the host fills under its present limit.
  void allow(bool allowed);

  /// From now on ops leave their recipes, if that is allowed; until `end`. Those that there are can
  /// be used afterwards, too.
  void begin();
  void end() noexcept {
    on_.store(false, std::memory_order_relaxed);
  }
  bool on() const noexcept {
    return on_.load(std::memory_order_relaxed);
  }

  /// An outermost op begins, and has pinned its inputs; ends, and has made its outputs.
  void begin_op(const at::RecordFunction& record, Frame& frame);
  void end_op(const at::RecordFunction& record, Frame& frame);

  /// Returns false if it stays: it has no recipe that will do, or is in use. Not inside a foreign
  /// call.
  bool drop(const EntityPtr& entity);

 private:
  struct Made {
    std::weak_ptr<Entity> entity;
    std::shared_ptr<OpRecipe> recipe; // a loose one
    size_t output = 0;
  };
  using MadeByEntity = std::unordered_map<const Entity*, Made>;

  void note(const EntityPtr& entity, Made made);

  Pager& pager_;
  Recipes& recipes_;
  Audition& audition_;
  std::atomic<bool> allowed_{false};
  std::atomic<bool> on_{false};
  std::mutex mutex_; // guards what follows; nothing is called under it
  MadeByEntity made_;
  size_t sweep_at_ = 1024;
};

} // namespace torch_lms
