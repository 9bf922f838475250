#include <extension/access/EntityLookup.h>

#include <extension/base/Backward.h>
#include <extension/base/Interpreter.h>
#include <extension/base/ThreadContext.h>

namespace torch_lms {
namespace {

/// Note [Threads of libraries]
/// What the ops of a thread that a C++ library has started make is used outside of ops, too: Gloo's
/// threads make buffers, and receive into them by their addresses, while the program's ops go on.
/// So no storage becomes an entity there: it does at its first use by an op of the program's. What
/// a collective makes inside of itself on the program's thread stays for good, as what it was
/// given.
bool on_library_thread() {
  const auto on_python_thread = interpreter().on_python_thread;
  return on_python_thread != nullptr && !on_python_thread() && !in_backward();
}

} // namespace

EntityPtr EntityLookup::find_or_track(c10::StorageImpl& storage, FoundBy by) const {
  return on_library_thread() ? pager_.find(storage) : pager_.find_or_track(storage, by);
}

EntityPtr EntityLookup::find_for_address(c10::StorageImpl& storage) const {
  const bool tracked = has_bytes(storage) && policy_.tracks(storage.nbytes());
  if (!tracked && !(has_bytes(storage) && pager_.tracks_by_hand())) {
    return nullptr;
  }
  const FoundBy found = this_thread().op != nullptr ? FoundBy::kInnerOp : FoundBy::kOp;
  return find_or_track(storage, tracked ? found : FoundBy::kHand);
}

void EntityLookup::discover(const std::vector<c10::Storage>& storages) const {
  Frame& frame = frame_of_thread();
  for (const c10::Storage& storage : storages) {
    find(*storage.unsafeGetStorageImpl(), frame);
  }
}

} // namespace torch_lms
