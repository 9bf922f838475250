#pragma once

#include <functional>
#include <memory>
#include <utility>

#include <ATen/record_function.h>

#include <extension/access/Chaos.h>
#include <extension/access/EntityLookup.h>
#include <extension/access/Frame.h>
#include <extension/access/GivenAddresses.h>
#include <extension/access/OpInputs.h>
#include <extension/access/OpKind.h>
#include <extension/access/Planning.h>
#include <extension/access/ProgramThread.h>
#include <extension/access/Recipes.h>
#include <extension/policy/Policy.h>

namespace torch_lms {

/// Layer 2: pins an op's inputs and pages them in before the op, lets them go after it, and tells
/// of it. When ops come here is the matter of `OpCallbacks`.
///
/// Thread-safe: any thread may run ops, with and without the GIL. What they wait for is in
/// README.md, Who waits for what.
class Observer {
 public:
  /// One in a process, made before ops are observed.
  Observer(
      Pager& pager,
      Policy& policy,
      Recipes& recipes,
      Planning& planning,
      Chaos& chaos,
      GivenAddresses& addresses,
      const EntityLookup& lookup);

  /// What to do when the ops of a thread have been observed for nothing for a while: see Note [Ops
  /// that began unseen]. Set up before ops are observed.
  void set_when_idle(std::function<void()> call) {
    when_idle_ = std::move(call);
  }

  /// What PyTorch calls for an op on its thread, before and after it; nothing in a forked child.
  static std::unique_ptr<at::ObserverContext> on_begin(const at::RecordFunction& record);
  static void on_end(const at::RecordFunction& record, at::ObserverContext* context);

 private:
  void begin(const at::RecordFunction& record);
  void begin_inside(const at::RecordFunction& record, Frame& frame);
  void begin_op(
      const at::RecordFunction& record,
      const char* name,
      Frame& frame,
      const OpTraits& op);
  bool is_of_program(Frame& frame);
  void tell_begin(const at::RecordFunction& record, Frame& frame);
  void begin_outermost(const at::RecordFunction& record, const char* name, Frame& frame);
  void end(const at::RecordFunction& record);
  void note_idle(Frame& frame);
  void note_end(const at::RecordFunction& record, Frame& frame);
  void note_program_thread();
  void tell_policy(const at::RecordFunction& record, Frame& frame);
  void note_output(c10::StorageImpl& storage, size_t from_bytes, Frame& frame);
  void note_outputs(const at::RecordFunction& record, Frame& frame);
  void note_recipe(const at::RecordFunction& record, Frame& frame);
  void release_pinned(Frame& frame) noexcept;

  Pager& pager_;
  Policy& policy_;
  Recipes& recipes_;
  Planning& planning_;
  Chaos& chaos_;
  GivenAddresses& addresses_;
  const EntityLookup lookup_;
  OpInputs inputs_;
  ProgramThread program_;
  std::function<void()> when_idle_;
};

} // namespace torch_lms
