#pragma once

#include <exception>

#include <ATen/record_function.h>

#include <extension/access/EntityLookup.h>
#include <extension/access/Frame.h>
#include <extension/access/LargeOps.h>
#include <extension/access/OpKind.h>
#include <extension/access/Planning.h>
#include <extension/access/Recipes.h>
#include <extension/policy/Policy.h>

namespace torch_lms {

/// What ops use: pinned before they run, and brought in.
///
/// Thread-safe: every method may be called from any thread, with and without the GIL, with the
/// frame of that thread. `pin` and `bring` wait as `Pager::use` for what is not resident and, where
/// there are recipes, as `Recipes::before_write`; the others block on nothing but mutexes.
class OpInputs {
 public:
  OpInputs(
      Pager& pager,
      Policy& policy,
      Recipes& recipes,
      Planning& planning,
      const EntityLookup& lookup)
      : pager_(pager),
        policy_(policy),
        recipes_(recipes),
        planning_(planning),
        lookup_(lookup),
        large_ops_(pager, policy) {}

  /// Of an op that begins; they are added to `frame.pinned`. False if not all of them could be
  /// seen.
  bool pin(const at::RecordFunction& record, Frame& frame, const OpTraits& op);

  /// Of an op that only calls others: they come in, and need not stay.
  void bring(const at::RecordFunction& record, Frame& frame);

  /// They could not be brought: what is dropped has no host copy that an op could work on instead.
  void refuse_dropped(const at::RecordFunction& record, const std::exception& error);

  /// The op that ends was refused memory.
  void note_refused(const at::RecordFunction& record, const Frame& frame);
  /// The outermost op has run, and its inputs were large.
  void note_made(const at::RecordFunction& record, const Frame& frame);

 private:
  struct Pinning;
  void note_stream(c10::Device device, Pinning& pinning);
  void pin_input(c10::StorageImpl& storage, size_t nbytes, Frame& frame, Pinning& pinning);
  void look_at_input(c10::StorageImpl& storage, Frame& frame, Pinning& pinning);
  void settle_pinned(
      const at::RecordFunction& record,
      Frame& frame,
      OpKind kind,
      size_t first,
      bool all,
      Pinning& pinning);

  Pager& pager_;
  Policy& policy_;
  Recipes& recipes_;
  Planning& planning_;
  const EntityLookup lookup_;
  LargeOps large_ops_;
};

/// Brings in what has been pinned from `first` on, of which not all is resident, for an op of
/// `kind`. Thread-safe, with and without the GIL; waits as `Pager::use`.
void use_unsettled(Pager& pager, Pinned& pinned, size_t first, OpKind kind);

} // namespace torch_lms
