#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <c10/core/Storage.h>

#include <extension/access/GivenAddresses.h>
#include <extension/access/OpCallbacks.h>

namespace torch_lms {

class PageoutBatch;

/// What a program asks for by hand.
///
/// Thread-safe: every method may be called from any thread, without the GIL. Those that wait say
/// so; none waits for an op of another thread but where it says so.
class ManualPaging {
 public:
  ManualPaging(Pager& pager, OpCallbacks& callbacks, GivenAddresses& addresses)
      : pager_(pager), callbacks_(callbacks), addresses_(addresses) {}

  /// Enqueues page-outs and returns how many. Storages that are out already, or on their way,
  /// have no bytes, or are in use by a running op are left alone. Waits for ops that began unseen:
  /// see `OpCallbacks::Request`. Throws PageoutRefused for one
  /// that can never be paged out as it is; those before it are enqueued.
  int64_t pageout(const std::vector<c10::Storage>& storages);

  /// Enqueues page-ins and returns how many; with `start`, the worker works on them.
  int64_t prefetch(const std::vector<c10::Storage>& storages, bool start);

  /// Makes a storage's memory stay where it is from now on, and come in. May wait as
  /// `Pager::use`. `unpin` throws Error if it has not been pinned.
  void pin(const c10::Storage& storage);
  void unpin(const c10::Storage& storage);

  /// `resident` for a storage without an entity.
  std::string state(const c10::Storage& storage);

  /// These wait: see `Pager`.
  void wait_pageouts();
  void wait_pageins();
  void pagein_all();

 private:
  void add(PageoutBatch& batch, const c10::Storage& storage);
  void add(PageoutBatch& batch, const c10::Storage& storage, const EntityPtr& entity);

  Pager& pager_;
  OpCallbacks& callbacks_;
  GivenAddresses& addresses_;
};

} // namespace torch_lms
