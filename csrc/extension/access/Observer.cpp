#include <extension/access/Observer.h>

#include <algorithm>
#include <memory>
#include <utility>

#include <ATen/Parallel.h>
#include <entity/OpClock.h>
#include <torch/csrc/autograd/function.h>

#include <extension/access/Storages.h>
#include <extension/base/Backward.h>
#include <extension/base/ErrorText.h>
#include <extension/base/ForeignCall.h>
#include <extension/base/Fork.h>
#include <extension/base/Interpreter.h>
#include <extension/base/ThreadContext.h>

namespace torch_lms {
namespace {

constexpr uint64_t kOpsBetweenSettles = 8;

// The callbacks get nothing but the record.
std::atomic<Observer*> instance{nullptr};

void release_all(Pinned& used) noexcept {
  for (Entity* entity : used.served) {
    entity->end_service();
  }
  for (Entity* entity : used.pinned) {
    entity->unpin();
  }
  used.served.clear();
  used.pinned.clear();
}

void take_back(const GivenOut& given) noexcept {
  if (given.on_host) {
    given.entity->end_service();
  }
  given.entity->unpin();
}

void release_given_out(Frame& frame) noexcept {
  for (const GivenOut& given : frame.given_out) {
    take_back(given);
  }
  frame.given_out.clear();
}

// A plain pointer in the thread's own block is read in one instruction; an object that has
// to be constructed and destroyed goes through two calls, and every op comes here twice.
thread_local Frame* this_frame __attribute__((tls_model("initial-exec"))) = nullptr;

Frame& make_frame() {
  struct Cleaner {
    ~Cleaner() {
      if (Frame* frame = std::exchange(this_frame, nullptr)) {
        release_given_out(*frame);
        delete frame;
      }
    }
  };
  this_frame = new Frame(); // too large for a thread's own block
  static thread_local Cleaner cleaner; // ops of later destructors leave their frame behind
  static_cast<void>(&cleaner);
  return *this_frame;
}

Frame& frame_of_thread() {
  return this_frame != nullptr ? *this_frame : make_frame();
}

UsedDevices devices_of(const Frame& frame) {
  UsedDevices used;
  for (auto at = frame.pinned.begin(); at != frame.pinned.end(); ++at) {
    const Entity* entity = *at;
    Device* device = &entity->device();
    // One that is given twice counts once, as in LargeOps::make_fit.
    used.input_bytes += std::find(frame.pinned.begin(), at, entity) == at ? entity->nbytes() : 0;
    if (device != used.devices[0] && device != used.devices[1]) {
      used.devices[used.devices[0] == nullptr ? 0 : 1] = device;
    }
  }
  return used;
}

bool is_on_main_thread(Frame& frame) {
  if (frame.on_main_thread < 0) {
    const auto ask = interpreter().on_main_thread;
    frame.on_main_thread = ask == nullptr || ask() ? 1 : 0;
  }
  return frame.on_main_thread != 0;
}

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

Observer::Observer(Pager& pager, Policy& policy, Recipes& recipes, Planning& planning, Chaos& chaos)
    : pager_(pager),
      policy_(&policy),
      recipes_(recipes),
      planning_(planning),
      chaos_(chaos),
      large_ops_(pager, policy) {
  instance.store(this, std::memory_order_release);
  pager_.set_raw_access([this](c10::StorageImpl& storage) { raw_access(storage); });
}

// --- the callback ---------------------------------------------------------------------

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
    // What an op of PyTorch's calls uses the same, but for Python code that runs inside of it:
    // hooks, and subclasses of tensors. That matters where something is dropped, which has no host
    // copy.
    OpTraits op =
        frame.holding || recipes_.any() ? frame.kinds.of(record, record.name()) : OpTraits();
    if (op.kind > OpKind::kComposite) {
      op.kind = frame.collective ? OpKind::kCollective : op.kind;
      pin_inputs(record, frame, op);
    }
    return;
  }
  const char* const name = record.name();
  OpTraits op = frame.kinds.of(record, name);
  const OpKind kind = op.kind = OpKinds::kind_now(record, op);
  if (kind <= OpKind::kComposite) {
    if (kind == OpKind::kNode) {
      policy_->note_node_begins();
    } else if (kind == OpKind::kComposite && pager_.paged_out_storages() != 0) {
      bring_inputs(record, frame);
    }
    return;
  }
  frame.depth = 1;
  frame.collective = kind == OpKind::kCollective;
  frame.holding = kind == OpKind::kHolding || frame.collective;
  bool all = true;
  try {
    begin_outermost(record, name, frame);
    all = pin_inputs(record, frame, op);
  } catch (const std::exception& error) { // PyTorch logs it, and runs the op
    refuse_dropped(record, error);
    throw;
  }
  if (!all && !frame.holding) {
    release_pinned(frame); // The op comes again, unwrapped: what it uses then is let go of then.
    frame.depth = 0;
    return;
  }
  frame.sealed = kind == OpKind::kSealed;
  frame.makes_empty = op.makes_empty;
  if (at::in_parallel_region()) { // a kernel's own threads: part of another op
    frame.inside_kernel = true;
  } else if (planning_.wants_ops()) {
    if (in_program(frame)) {
      planning_.begin_op(record, frame);
    }
  } else if (frame.sealed && chaos_.wants_recipe()) {
    frame.recipe = recipes_.capture(record);
  }
}

/// What is dropped has no host copy that an op could work on instead.
void Observer::refuse_dropped(const at::RecordFunction& record, const std::exception& error) {
  for (const c10::IValue& value : inputs_of(record)) {
    visit_storages(value, [&](c10::StorageImpl& storage) {
      const EntityPtr entity = has_bytes(storage) ? pager_.find(storage) : nullptr;
      if (entity != nullptr && entity->state() == EntityState::kDropped) {
        entity->refuse(text_of(error));
      }
    });
  }
}

void Observer::begin_outermost(const at::RecordFunction& record, const char* name, Frame& frame) {
  OpClock::get().begin_op();
  frame.timed = policy_->enabled();
  if (frame.timed) {
    frame.now = policy_->cycles().next_op();
  }
  if (!frame.given_out.empty() && !in_foreign_call()) {
    take_back_returned(frame);
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

/// At the first op of a backward.
void Observer::note_program_thread() {
  if (in_backward() && !policy_->cycles().in_backward()) {
    const auto node = torch::autograd::get_current_node();
    if (node != nullptr) {
      program_thread_.store(node->thread_id(), std::memory_order_relaxed);
    }
  }
}

bool Observer::in_program(Frame& frame) const {
  return is_on_main_thread(frame) || in_backward() ||
         program_thread_.load(std::memory_order_relaxed) == at::RecordFunction::currentThreadId();
}

Entity* Observer::find(c10::StorageImpl& storage, Frame& frame) {
  if (!has_bytes(storage)) {
    return nullptr;
  }
  const bool tracked = policy_->tracks(storage.nbytes());
  if (!tracked && !pager_.tracks_by_hand()) {
    return nullptr;
  }
  if (!tracked) {
    return frame.recent.find(storage, pager_);
  }
  return frame.recent.find_or_track(
      storage, [&] { return find_or_track(storage, /*by_hand=*/false); });
}

EntityPtr Observer::find_or_track(c10::StorageImpl& storage, bool by_hand) {
  return on_library_thread() ? pager_.find(storage) : pager_.find_or_track(storage, by_hand);
}

/// What `pin_inputs` finds on its way.
struct Observer::Pinning {
  Device* noted = nullptr; // whose stream has been noted
  const Device* asked = nullptr; // whether it captures
  size_t input_bytes = 0;
  bool settled = true;
};

inline void Observer::pin_input(
    c10::StorageImpl& storage,
    bool written,
    Frame& frame,
    Pinning& pinning) {
  if (storage.device_type() == c10::kCUDA) {
    // Also for what is no entity yet: if it is paged out next, this op comes first.
    Device* device = pager_.devices().known(storage.device());
    if (device != nullptr && device != pinning.noted) {
      device->note_current_stream();
      pinning.noted = device;
    }
  } else if (storage.device_type() != c10::kCPU) {
    return;
  }
  if (written) {
    recipes_.before_write(storage);
  }
  Entity* entity = find(storage, frame);
  if (entity == nullptr) {
    return;
  }
  frame.pinned.push_back(entity);
  if (planning_.recording()) {
    frame.wrote.push_back(written);
  }
  const bool resident = entity->pin_settled();
  if (&entity->device() != pinning.asked) {
    pinning.asked = &entity->device();
    pinning.settled = pinning.settled && !pinning.asked->capturing();
  }
  pinning.settled = pinning.settled && resident;
  if (written && (!resident || entity->keeps_copy())) {
    frame.written.push_back(entity);
  }
  if (frame.timed) {
    pinning.input_bytes += entity->uses.last() != frame.now ? entity->nbytes() : 0;
    entity->uses.record(frame.now, policy_->cycles().shape(frame.cycle));
  }
}

/// False if not all of the inputs could be seen.
bool Observer::pin_inputs(const at::RecordFunction& record, Frame& frame, const OpTraits& op) {
  const size_t first = frame.pinned.size();
  Pinning pinning;
  pinning.settled = op.kind != OpKind::kCollective && op.kind != OpKind::kInspecting;
  bool all = true;
  size_t argument = 0;
  for (const c10::IValue& value : inputs_of(record)) {
    const bool written = op.writes(argument++);
    const auto pin = [&](c10::StorageImpl& storage) {
      pin_input(storage, written, frame, pinning);
    };
    all = visit_storages(value, pin) && all;
  }
  if (frame.pinned.size() != first) {
    settle_pinned(record, frame, op.kind, first, all, pinning);
  }
  for (size_t i = first; op.takes_addresses && i < frame.pinned.size(); ++i) {
    frame.kept_watch.add(*frame.pinned[i]);
  }
  return all;
}

/// What has been pinned from `first` on: there is something.
void Observer::settle_pinned(
    const at::RecordFunction& record,
    Frame& frame,
    OpKind kind,
    size_t first,
    bool all,
    Pinning& pinning) {
  size_t input_bytes = pinning.input_bytes;
  if (input_bytes != 0 && all &&
      LargeOps::worth_looking(frame.pinned[first]->device(), input_bytes)) {
    large_ops_.make_fit(record, frame, first);
  }
  if (!pinning.settled) {
    use_unsettled(frame, first, kind);
  }
  for (Entity* entity : frame.written) { // also those that have just come in
    if (entity->keeps_copy()) {
      entity->release_copy();
    }
  }
  frame.written.clear();
  for (const Entity* entity : frame.served) {
    input_bytes -= std::min(input_bytes, entity->nbytes());
  }
  this_thread().op_input_bytes += input_bytes; // that lie on the device
}

void Observer::bring_inputs(const at::RecordFunction& record, Frame& frame) {
  for (const c10::IValue& value : inputs_of(record)) {
    visit_storages(value, [&](c10::StorageImpl& storage) {
      const c10::DeviceType type = storage.device_type();
      Entity* entity = type == c10::kCPU || type == c10::kCUDA ? find(storage, frame) : nullptr;
      if (entity != nullptr && !entity->pin_settled()) {
        if (pager_.use(entity_of(entity->shared_from_this())) == Place::kHost) {
          entity->end_service();
        }
      }
      if (entity != nullptr) {
        entity->unpin();
      }
    });
  }
}

/// All inputs are pinned by now, so that making room for one does not push another out. Calls
/// their page-outs off, which could not be committed now, and making room would wait for them;
/// then pages in.
void Observer::use_unsettled(Pinned& frame, size_t first, OpKind kind) {
  std::vector<EntityPtr> entities;
  for (size_t i = first; i < frame.pinned.size(); ++i) {
    entities.push_back(entity_of(frame.pinned[i]->shared_from_this()));
    pager_.call_off_pageout(entities.back());
  }
  for (const EntityPtr& entity : entities) {
    if (kind == OpKind::kCollective || entity->device().capturing()) {
      entity->fix();
    }
    const bool served =
        std::find(frame.served.begin(), frame.served.end(), entity.get()) != frame.served.end();
    if (!served && pager_.use(entity) == Place::kHost) {
      frame.served.push_back(entity.get());
    }
    if (kind == OpKind::kInspecting) {
      entity->stop_watching();
    }
  }
}

void Observer::note_outputs(const at::RecordFunction& record, Frame& frame) {
  for (const c10::IValue& value : outputs_of(record)) {
    visit_storages(value, [&](c10::StorageImpl& storage) {
      Entity* entity = find(storage, frame);
      if (entity != nullptr && frame.timed) {
        entity->uses.record(frame.now, policy_->cycles().shape(frame.cycle));
      }
      if (entity != nullptr && frame.makes_empty) {
        give(entity_of(entity->shared_from_this()), innermost_call());
      }
    });
  }
}

void Observer::wait_begins(Device& device) {
  planning_.wait_begins(device);
}

void Observer::wait_ends(Device& device) noexcept {
  planning_.wait_ends(device);
}

void Observer::backward_ended() {
  planning_.backward_ended();
}

void Observer::note_recipe(const at::RecordFunction& record, Frame& frame) {
  const std::shared_ptr<OpRecipe> recipe = std::move(frame.recipe);
  const std::vector<at::Tensor> made = tensors_in(outputs_of(record));
  if (!recipes_.finish(recipe, made)) {
    return;
  }
  const std::vector<c10::StorageImpl*> storages = recipes_.note_made(recipe, made);
  for (size_t i = 0; i < storages.size(); ++i) {
    Entity* entity = storages[i] != nullptr ? find(*storages[i], frame) : nullptr;
    if (entity != nullptr) {
      chaos_.note_made(entity_of(entity->shared_from_this()), recipe, i);
    }
  }
}

void Observer::release_pinned(Frame& frame) noexcept {
  this_thread().op = nullptr;
  this_thread().op_name = nullptr;
  this_thread().op_input_bytes = 0;
  frame.kept_watch.end();
  release_all(frame);
  frame.wrote.clear();
  OpClock::get().end_op();
  if (frame.recipe != nullptr) {
    frame.recipe = nullptr;
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
  if (--frame.depth != 0) {
    return;
  }
  UsedDevices used;
  if (frame.timed) {
    used = devices_of(frame);
  }
  std::exception_ptr failed;
  try {
    note_end(record, frame, used.input_bytes);
  } catch (...) {
    failed = std::current_exception();
  }
  release_pinned(frame);
  if (failed != nullptr) {
    std::rethrow_exception(failed); // PyTorch logs it
  }
  if (std::exchange(frame.inside_kernel, false)) {
    return;
  }
  planning_.after_op(frame);
  if (frame.timed) {
    tell_policy(record, frame, used);
  }
  chaos_.after_op();
}

/// What the op has made, before what it has pinned is let go of.
void Observer::note_end(const at::RecordFunction& record, Frame& frame, size_t input_bytes) {
  if (record.needsOutputs()) {
    note_outputs(record, frame);
  }
  if (planning_.wants_ops() && !frame.inside_kernel) {
    planning_.end_op(record, frame);
  } else if (frame.recipe != nullptr && record.needsOutputs()) {
    note_recipe(record, frame);
  }
  if (std::exchange(this_thread().op_refused, false)) {
    large_ops_.note_refused(record, input_bytes);
  }
}

void Observer::tell_policy(
    const at::RecordFunction& record,
    Frame& frame,
    const UsedDevices& used) {
  note_program_thread();
  const bool on_main_thread = is_on_main_thread(frame);
  const bool of_program = in_program(frame);
  policy_->after_op(used.devices[0], on_main_thread, of_program);
  if (used.devices[1] != nullptr) {
    policy_->after_op(used.devices[1], on_main_thread, of_program);
  }
  if (of_program) {
    planning_.note_op(record);
  }
}

// --- addresses that are given out -------------------------------------------------------

void Observer::give_out(c10::StorageImpl& storage) {
  if (!note_access_in_op(storage)) {
    lend(storage, {});
  }
}

/// Somebody takes the address of a watched storage to write to it.
void Observer::raw_access(c10::StorageImpl& storage) {
  if (!note_access_in_op(storage)) {
    lend(storage, innermost_call());
  }
}

/// False unless an op's kernel takes the address of what the op has pinned, and may write to it.
bool Observer::note_access_in_op(c10::StorageImpl& storage) {
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

/// Also of a storage that no op has shown yet: another thread may page it out.
EntityPtr Observer::entity_for_address(c10::StorageImpl& storage) {
  const bool tracked = has_bytes(storage) && policy_->tracks(storage.nbytes());
  return tracked || (has_bytes(storage) && pager_.tracks_by_hand())
             ? find_or_track(storage, /*by_hand=*/!tracked)
             : nullptr;
}

void Observer::lend(c10::StorageImpl& storage, const NativeCall& call) {
  before_raw_access(storage);
  if (const EntityPtr entity = entity_for_address(storage)) {
    planning_.note_raw_access(entity);
    give(entity, call);
  }
}

void Observer::give(const EntityPtr& entity, const NativeCall& call) {
  Frame& frame = frame_of_thread();
  entity->device().note_current_stream();
  frame.given_out.push_back({entity, call});
  entity->pin(); // before it comes in: making room for it must not push it out
  pager_.call_off_pageout(entity);
  if (pager_.use(entity) == Place::kHost) {
    frame.given_out.back().on_host = true;
  }
  entity->uses.record(policy_->cycles().now(), policy_->cycles().shape());
  entity->release_copy();
}

void Observer::take_back() {
  release_given_out(frame_of_thread());
}

/// See Note [Functions that call Python].
void Observer::take_back_returned(Frame& frame) {
  const auto goes_on = [](const GivenOut& given) { return waits_for_python(given.call); };
  const auto returned =
      std::stable_partition(frame.given_out.begin(), frame.given_out.end(), goes_on);
  std::for_each(returned, frame.given_out.end(), &torch_lms::take_back);
  frame.given_out.erase(returned, frame.given_out.end());
}

void Observer::discover(const std::vector<c10::Storage>& storages) {
  Frame& frame = frame_of_thread();
  for (const c10::Storage& storage : storages) {
    find(*storage.unsafeGetStorageImpl(), frame);
  }
}

void Observer::hold(const std::vector<c10::Storage>& storages, Pinned& held) {
  for (const c10::Storage& storage : storages) {
    if (const EntityPtr entity = entity_for_address(*storage.unsafeGetStorageImpl())) {
      held.pinned.push_back(entity.get());
      entity->pin();
      entity->uses.record(policy_->cycles().now(), policy_->cycles().shape());
      entity->device().note_current_stream();
    }
  }
  use_unsettled(held, 0, OpKind::kSealed);
  for (Entity* entity : held.pinned) {
    entity->release_copy(); // what such kernels write is not known
  }
  for (const c10::Storage& storage : storages) {
    recipes_.before_write(*storage.unsafeGetStorageImpl());
  }
}

void Observer::release(Pinned& held) {
  release_all(held);
}

// --- when ops are observed ----------------------------------------------------------------

/// Under the mutex. The new callback is there before the old one goes: no op gets by between.
void Observer::install(bool outputs) {
  const at::CallbackHandle before = handle_;
  handle_ = at::addGlobalCallback(
      at::RecordFunctionCallback(&on_begin, &on_end)
          .needsInputs(true)
          .needsOutputs(outputs)
          .scopes({at::RecordScope::FUNCTION}));
  outputs_ = outputs;
  installed_.store(true, std::memory_order_release);
  if (before != at::INVALID_CALLBACK_HANDLE) {
    at::removeCallback(before);
  }
}

void Observer::uninstall() {
  at::removeCallback(handle_);
  handle_ = at::INVALID_CALLBACK_HANDLE;
  installed_.store(false, std::memory_order_release);
  recipes_.forget();
}

bool Observer::wanted() const {
  return fed_ || requests_.load() != 0 || pager_.active();
}

void Observer::start() {
  std::lock_guard<std::mutex> lock(mutex_);
  fed_ = true;
  if (!observing() || !outputs_) {
    install(/*outputs=*/true);
  }
  pager_.note_all_ops_observed();
}

void Observer::stop() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    fed_ = false;
    if (observing() && outputs_ && wanted()) {
      install(/*outputs=*/false); // for what is still out
    }
  }
  stop_if_idle();
}

void Observer::stop_if_idle() {
  if (!observing() || wanted()) {
    return;
  }
  std::lock_guard<std::mutex> lock(mutex_);
  if (observing() && !wanted()) {
    uninstall();
  }
}

Observer::Request::Request(Observer& observer) : observer_(observer) {
  observer_.requests_.fetch_add(1);
  std::lock_guard<std::mutex> lock(observer_.mutex_);
  first_ = !observer_.observing();
  if (first_) {
    try {
      observer_.install(/*outputs=*/false);
    } catch (...) {
      observer_.requests_.fetch_sub(1);
      throw;
    }
  }
}

Observer::Request::~Request() {
  observer_.requests_.fetch_sub(1);
}

} // namespace torch_lms
