#pragma once

#include <vector>

#include <c10/core/Storage.h>

#include <extension/access/EntityLookup.h>
#include <extension/access/Frame.h>
#include <extension/access/Planning.h>
#include <extension/access/Recipes.h>
#include <extension/policy/Policy.h>

namespace torch_lms {

/// What stays where it is because somebody has its address: given out to a thread, or held.
///
/// Thread-safe: every method may be called from any thread, with and without the GIL. Those that
/// bring bytes in wait as `Pager::use` does; each says so.
class GivenAddresses {
 public:
  /// One in a process: from now on PyTorch's word of raw accesses comes here.
  GivenAddresses(
      Pager& pager,
      Policy& policy,
      Recipes& recipes,
      Planning& planning,
      const EntityLookup& lookup);

  /// The calling thread is given a storage's address, to read and to write: the bytes come in,
  /// and stay where they are until the thread's next op or call of ours that is not inside the
  /// same function of another extension (Note [Foreign calls]). May wait as `Pager::use` does.
  void give_out(c10::StorageImpl& storage);

  /// The same of an entity, on behalf of `call`, which may go on using the address while it waits
  /// for Python (Note [Functions that call Python]). May wait as `Pager::use` does.
  void give(const EntityPtr& entity, const NativeCall& call);

  /// Somebody is about to have a storage's address, and may write to it: what has been dropped and
  /// is made from its bytes comes back first. Waits as `Recipes::before_write`.
  void before_raw_access(c10::StorageImpl& storage) {
    recipes_.before_write(storage);
  }

  /// What has been given out to the calling thread may go again. Waits for nothing.
  void take_back() {
    frame_of_thread().take_back_all();
  }
  /// The same, but for what functions have got that wait for Python. `frame`: the thread's.
  void take_back_returned(Frame& frame);

  /// Pins storages' entities (those that automatic mode tracks become ones) and brings them in:
  /// raw kernels run on them. To be released with `release`. May wait as `Pager::use` does.
  void hold(const std::vector<c10::Storage>& storages, Pinned& held);
  /// Waits for nothing.
  void release(Pinned& held) {
    held.release();
  }

 private:
  void raw_access(c10::StorageImpl& storage);
  bool note_access_in_op(c10::StorageImpl& storage);
  void lend(c10::StorageImpl& storage, const NativeCall& call);
  void note_use(Entity& entity);

  Pager& pager_;
  Policy& policy_;
  Recipes& recipes_;
  Planning& planning_;
  const EntityLookup lookup_;
};

} // namespace torch_lms
