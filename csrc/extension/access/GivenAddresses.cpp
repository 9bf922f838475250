#include <extension/access/GivenAddresses.h>

#include <algorithm>

#include <c10/util/ScopeExit.h>

#include <extension/access/OpInputs.h>
#include <extension/base/ThreadContext.h>

namespace torch_lms {

GivenAddresses::GivenAddresses(
    Pager& pager,
    Policy& policy,
    Recipes& recipes,
    Planning& planning,
    const EntityLookup& lookup)
    : pager_(pager), policy_(policy), recipes_(recipes), planning_(planning), lookup_(lookup) {
  pager_.set_raw_access([this](c10::StorageImpl& storage) { raw_access(storage); });
}

void GivenAddresses::give_out(c10::StorageImpl& storage) {
  if (!note_access_in_op(storage)) {
    lend(storage, {});
  }
}

/// Somebody takes the address of a watched storage to write to it.
void GivenAddresses::raw_access(c10::StorageImpl& storage) {
  if (!note_access_in_op(storage)) {
    lend(storage, innermost_call());
  }
}

/// False unless an op's kernel takes the address of what the op has pinned, and may write to it.
bool GivenAddresses::note_access_in_op(c10::StorageImpl& storage) {
  if (this_thread().replaying) {
    return true;
  }
  Frame& frame = frame_of_thread();
  const EntityPtr entity = has_bytes(storage) ? pager_.find(storage) : nullptr;
  if (entity == nullptr ||
      std::find(frame.pinned.begin(), frame.pinned.end(), entity.get()) == frame.pinned.end()) {
    return false;
  }
  if (!frame.kept_watch.holds(*entity)) {
    entity->release_copy();
  }
  return true;
}

void GivenAddresses::lend(c10::StorageImpl& storage, const NativeCall& call) {
  before_raw_access(storage);
  if (const EntityPtr entity = lookup_.find_for_address(storage)) {
    planning_.note_raw_access(entity);
    give(entity, call);
  }
}

void GivenAddresses::give(const EntityPtr& entity, const NativeCall& call) {
  Frame& frame = frame_of_thread();
  entity->device().note_current_stream();
  frame.given_out.push_back({entity, call});
  entity->pin(); // before it comes in: making room for it must not push it out
  pager_.requests().call_off_pageout(entity);
  if (pager_.use(entity) == Place::kHost) {
    frame.given_out.back().on_host = true;
  }
  note_use(*entity);
  entity->release_copy();
}

void GivenAddresses::note_use(Entity& entity) {
  entity.uses.record(policy_.cycles().now(), policy_.cycles().shape());
}

/// See Note [Functions that call Python].
void GivenAddresses::take_back_returned(Frame& frame) {
  const auto goes_on = [](const GivenOut& given) { return waits_for_python(given.call); };
  const auto returned =
      std::stable_partition(frame.given_out.begin(), frame.given_out.end(), goes_on);
  std::for_each(returned, frame.given_out.end(), [](const GivenOut& given) { given.take_back(); });
  frame.given_out.erase(returned, frame.given_out.end());
}

void GivenAddresses::hold(const std::vector<c10::Storage>& storages, Pinned& held) {
  auto if_refused = c10::make_scope_exit([&] { held.release(); });
  for (const c10::Storage& storage : storages) {
    if (const EntityPtr entity = lookup_.find_for_address(*storage.unsafeGetStorageImpl())) {
      held.pinned.push_back(entity.get());
      entity->pin();
      note_use(*entity);
      entity->device().note_current_stream();
    }
  }
  use_unsettled(pager_, held, 0, OpKind::kSealed);
  for (Entity* entity : held.pinned) {
    entity->release_copy(); // what such kernels write is not known
  }
  for (const c10::Storage& storage : storages) {
    before_raw_access(*storage.unsafeGetStorageImpl());
  }
  if_refused.release();
}

} // namespace torch_lms
