#include <extension/access/Observer.h>

#include <atomic>
#include <exception>
#include <utility>

#include <ATen/Parallel.h>
#include <c10/util/ScopeExit.h>
#include <entity/OpClock.h>
#include <torch/csrc/autograd/function.h>

#include <extension/access/Storages.h>
#include <extension/access/UnseenOps.h>
#include <extension/base/Backward.h>
#include <extension/base/ForeignCall.h>
#include <extension/base/Fork.h>
#include <extension/base/ThreadContext.h>

namespace torch_lms {
namespace {

constexpr uint64_t kOpsBetweenSettles = 64;
/// To observe so many takes about as long as to wait for ops that began unseen once more.
constexpr uint32_t kIdleOps = 1000;

// The callbacks get nothing but the record.
std::atomic<Observer*> instance{nullptr};

} // namespace

Observer::Observer(
    Pager& pager,
    Policy& policy,
    Recipes& recipes,
    Planning& planning,
    Chaos& chaos,
    GivenAddresses& addresses,
    const EntityLookup& lookup)
    : pager_(pager),
      policy_(policy),
      recipes_(recipes),
      planning_(planning),
      chaos_(chaos),
      addresses_(addresses),
      lookup_(lookup),
      inputs_(pager, policy, recipes, planning, lookup) {
  instance.store(this, std::memory_order_release);
}

std::unique_ptr<at::ObserverContext> Observer::on_begin(const at::RecordFunction& record) {
  if (!in_forked_child()) {
    instance.load(std::memory_order_relaxed)->begin(record);
  }
  return nullptr;
}

void Observer::on_end(const at::RecordFunction& record, at::ObserverContext*) {
  if (!in_forked_child()) {
    instance.load(std::memory_order_relaxed)->end(record);
  }
}

/// Note [Pairs of begin and end]
/// PyTorch calls both for every record, whatever either throws, and in the order of brackets. So
/// `depth` counts what has begun and must end, and is raised before anything can fail.
void Observer::begin(const at::RecordFunction& record) {
  Frame& frame = frame_of_thread();
  if (frame.depth > 0) {
    ++frame.depth;
    if (frame.holding || recipes_.any()) {
      begin_inside(record, frame);
    }
    return;
  }
  UnseenOps::note_op();
  const char* const name = record.name();
  OpTraits op = frame.kinds.of(record, name);
  op.kind = OpKinds::kind_now(record, op);
  if (op.kind > OpKind::kComposite) {
    begin_op(record, name, frame, op);
  } else if (op.kind == OpKind::kNode) {
    policy_.wakefulness().note_node_begins();
  } else if (op.kind == OpKind::kComposite && pager_.paged_out_storages() != 0) {
    inputs_.bring(record, frame);
  }
}

/// What an op of PyTorch's calls uses the same, but for Python code that runs inside of it: hooks,
/// and subclasses of tensors. That matters where something is dropped, which has no host copy.
void Observer::begin_inside(const at::RecordFunction& record, Frame& frame) {
  OpTraits op = frame.kinds.of(record, record.name());
  if (op.kind > OpKind::kComposite) {
    op.kind = frame.collective ? OpKind::kCollective : op.kind;
    inputs_.pin(record, frame, op);
  }
}

C10_ALWAYS_INLINE void Observer::begin_op(
    const at::RecordFunction& record,
    const char* name,
    Frame& frame,
    const OpTraits& op) {
  frame.depth = 1;
  frame.collective = op.kind == OpKind::kCollective;
  frame.holding = op.kind == OpKind::kHolding || frame.collective;
  frame.sealed = op.kind == OpKind::kSealed;
  frame.makes_empty = op.makes_empty;
  frame.inside_kernel = false;
  frame.large = false;
  frame.name = op.name;
  bool all = true;
  try {
    begin_outermost(record, name, frame);
    if (planning_.is_crowded() && is_of_program(frame)) {
      planning_.wait_for_pageouts();
    }
    if (planning_.prefetches().any() && is_of_program(frame)) {
      planning_.prefetches().begin();
    }
    all = inputs_.pin(record, frame, op);
    frame.inputs = frame.pinned.size();
  } catch (const std::exception& error) { // PyTorch logs it, and runs the op
    inputs_.refuse_dropped(record, error);
    throw;
  }
  if (!all && !frame.holding) {
    release_pinned(frame); // The op comes again, unwrapped: what it uses then is let go of then.
    frame.depth = 0;
    this_thread().in_foreign_call = InForeignCall::kAsk;
  } else if (frame.told) {
    tell_begin(record, frame);
  }
}

bool Observer::is_of_program(Frame& frame) {
  return is_on_main_thread(frame) || program_.runs(frame, in_backward());
}

void Observer::tell_begin(const at::RecordFunction& record, Frame& frame) {
  if (at::in_parallel_region()) { // a kernel's own threads: part of another op
    frame.inside_kernel = true;
  } else if (planning_.wants_ops()) {
    planning_.begin_op(record, frame, is_of_program(frame));
  } else if (frame.sealed && chaos_.wants_recipe()) {
    frame.recipe = recipes_.capture(record);
  }
}

C10_ALWAYS_INLINE void Observer::begin_outermost(
    const at::RecordFunction& record,
    const char* name,
    Frame& frame) {
  OpClock::get().begin_op();
  this_thread().in_foreign_call = InForeignCall::kUnknown;
  frame.timed = policy_.enabled();
  if (frame.timed) {
    frame.now = policy_.cycles().next_op();
    frame.used.clear();
  }
  frame.told = frame.timed || planning_.wants_ops() || chaos_.wants_recipe();
  if (!frame.given_out.empty() && !in_foreign_call()) {
    addresses_.take_back_returned(frame);
  }
  // It asks the device, and nobody waits for what it forgets but who wants ops unobserved again.
  if (pager_.arrivals().any() && (!frame.timed || frame.now % kOpsBetweenSettles == 0)) {
    pager_.arrivals().settle();
  }
  if (pager_.has_finished()) {
    const ActionTimes::Timer timer(pager_.action_times(), Action::kPageout); // a part of it
    pager_.commit_finished();
  }
  this_thread().op = &record;
  this_thread().op_number = 0;
  this_thread().op_name = name;
}

C10_ALWAYS_INLINE void Observer::note_output(
    c10::StorageImpl& storage,
    size_t from_bytes,
    Frame& frame) {
  const size_t nbytes = bytes_of(storage);
  Entity* entity = nbytes >= from_bytes ? lookup_.find_sized(storage, nbytes, frame) : nullptr;
  if (entity != nullptr && frame.timed && entity->uses.last() != frame.now) {
    entity->uses.record(frame.now, policy_.cycles().shape(frame.cycle));
  }
  if (entity != nullptr && frame.makes_empty) { // see Note [Functions that call Python]
    addresses_.give(entity_of(entity->shared_from_this()), innermost_call());
  }
}

/// What an op makes is known from then on; what it has got is known already.
void Observer::note_outputs(const at::RecordFunction& record, Frame& frame) {
  const size_t from_bytes = frame.timed ? lookup_.from_bytes() : policy_.tracked_from_bytes();
  for (const c10::IValue& value : outputs_of(record)) {
    if (c10::StorageImpl* storage = only_storage_of(value)) {
      note_output(*storage, from_bytes, frame);
    } else {
      visit_storages(value, [&](c10::StorageImpl& part) { note_output(part, from_bytes, frame); });
    }
  }
}

void Observer::note_recipe(const at::RecordFunction& record, Frame& frame) {
  const std::shared_ptr<OpRecipe> recipe = std::move(frame.recipe);
  const std::vector<at::Tensor> made = tensors_in(outputs_of(record));
  if (!recipes_.finish(recipe, made)) {
    return;
  }
  const std::vector<c10::StorageImpl*> storages = recipes_.note_made(recipe, made);
  for (size_t i = 0; i < storages.size(); ++i) {
    Entity* entity = storages[i] != nullptr ? lookup_.find(*storages[i], frame) : nullptr;
    if (entity != nullptr) {
      chaos_.note_made(entity_of(entity->shared_from_this()), recipe, i);
    }
  }
}

C10_ALWAYS_INLINE void Observer::release_pinned(Frame& frame) noexcept {
  ThreadContext& context = this_thread();
  context.op = nullptr;
  context.op_name = nullptr;
  context.op_input_bytes = 0;
  context.large_on = nullptr;
  if (!frame.pinned.empty()) {
    frame.kept_watch.end();
    frame.release();
    frame.inputs = 0;
    frame.written.clear();
    frame.wrote.clear();
  }
  OpClock::get().end_op();
  if (frame.recipe != nullptr) {
    frame.recipe = nullptr;
  }
  if (frame.loose_recipe != nullptr) {
    frame.loose_recipe = nullptr;
  }
  if (frame.before) {
    frame.before = c10::Storage();
  }
}

void Observer::end(const at::RecordFunction& record) {
  Frame& frame = frame_of_thread();
  if (frame.depth == 0) {
    return; // It is none of those that are counted.
  }
  if (frame.depth > 1) {
    --frame.depth;
    return;
  }
  const auto at_end =
      c10::make_scope_exit([] { this_thread().in_foreign_call = InForeignCall::kAsk; });
  std::exception_ptr failed;
  if (frame.told || record.needsOutputs() || this_thread().op_refused) {
    try {
      note_end(record, frame);
    } catch (...) {
      failed = std::current_exception();
    }
  }
  release_pinned(frame);
  // What Python code has run until now (a signal's, the garbage collector's) is inside.
  frame.depth = 0;
  if (failed != nullptr) {
    std::rethrow_exception(failed); // PyTorch logs it
  }
  if (!frame.told) {
    note_idle(frame);
    return;
  }
  if (std::exchange(frame.inside_kernel, false)) {
    return;
  }
  planning_.after_op(frame);
  if (frame.timed) {
    tell_policy(record, frame);
  }
  chaos_.after_op();
}

/// An op that nobody is told of is over.
C10_ALWAYS_INLINE void Observer::note_idle(Frame& frame) {
  if (!frame.given_out.empty() || pager_.active()) {
    frame.idle_ops = 0;
  } else if (++frame.idle_ops == kIdleOps) {
    frame.idle_ops = 0;
    when_idle_();
  }
}

/// What the op has made, before what it has pinned is let go of.
void Observer::note_end(const at::RecordFunction& record, Frame& frame) {
  if (record.needsOutputs()) {
    note_outputs(record, frame);
  }
  if (frame.told && planning_.wants_ops() && !frame.inside_kernel) {
    planning_.end_op(record, frame);
  } else if (frame.recipe != nullptr && record.needsOutputs()) {
    note_recipe(record, frame);
  }
  if (std::exchange(this_thread().op_refused, false)) {
    inputs_.note_refused(record, frame);
  } else if (frame.large && frame.timed && policy_.attention() != Attention::kAsleep) {
    inputs_.note_made(record, frame);
  }
}

/// In a backward that is about to be known.
void Observer::note_program_thread() {
  if (const auto node = torch::autograd::get_current_node()) {
    program_.note(node->thread_id());
  }
}

void Observer::tell_policy(const at::RecordFunction& record, Frame& frame) {
  const bool backward = in_backward();
  if (backward && !policy_.cycles().in_backward()) {
    note_program_thread();
  }
  const bool on_main_thread = is_on_main_thread(frame);
  const bool of_program = program_.runs(frame, backward);
  policy_.after_op(frame.used.first(), on_main_thread, of_program, backward);
  if (frame.used.second() != nullptr) {
    policy_.after_op(frame.used.second(), on_main_thread, of_program, backward);
  }
  if (of_program) {
    planning_.note_op(record);
  }
}

} // namespace torch_lms
