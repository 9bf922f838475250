#include <extension/OpObserver.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <utility>

#include <ATen/SparseCsrTensorImpl.h>
#include <ATen/SparseTensorImpl.h>
#include <ATen/core/TensorBase.h>
#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>

#include <extension/Chaos.h>
#include <extension/Fork.h>
#include <extension/MemoryPressure.h>
#include <extension/Pager.h>
#include <extension/TorchStorageBinding.h>

namespace torch_lms {
namespace {

constexpr size_t kNotTracking = SIZE_MAX;
constexpr size_t kLately = 16; // storages

std::atomic<size_t> tracked_from_bytes{kNotTracking};
std::mutex install_mutex;
at::CallbackHandle installed = at::INVALID_CALLBACK_HANDLE;
std::atomic<bool> is_installed{false};

/// What the ops that the calling thread is inside of have pinned.
struct Frame {
  int64_t depth = 0;
  bool native = false; // the outermost is PyTorch's own: it stays on one stream
  std::vector<EntityPtr> pinned;
  std::vector<const c10::StorageImpl*> storages; // of `pinned`, which keep these addresses theirs
  std::vector<EntityPtr> raw; // see `hold_raw`
};

// A plain pointer in the thread's own block is read in one instruction; an object that has
// to be constructed and destroyed goes through two calls, and every op comes here twice.
thread_local Frame* this_frame __attribute__((tls_model("initial-exec"))) = nullptr;

Frame& make_frame() {
  struct Owner {
    Frame frame;
    ~Owner() {
      this_frame = nullptr;
      for (const EntityPtr& entity : frame.raw) {
        entity->unpin();
      }
    }
  };
  thread_local Owner owner;
  this_frame = &owner.frame;
  return owner.frame;
}

Frame& frame() {
  return this_frame != nullptr ? *this_frame : make_frame();
}

void add_pinned(Frame& now, const c10::StorageImpl& storage, EntityPtr entity) {
  entity->pin(); // until the outermost op ends: its kernel may hold the address
  now.pinned.push_back(std::move(entity));
  now.storages.push_back(&storage);
}

/// Whether the op that runs has pinned the storage lately. Most ops that others call, and
/// most views, are of such ones: to find them again costs more than all the rest.
bool pinned_lately(const Frame& now, const c10::StorageImpl& storage) {
  const auto end = now.storages.end();
  const auto begin = end - static_cast<std::ptrdiff_t>(std::min(now.storages.size(), kLately));
  if (!now.native || std::find(begin, end, &storage) == end) {
    return false;
  }
  MemoryPressure::get().note_use();
  return true;
}

// --- finding the entities among an op's inputs and outputs ------------------------

template <typename Visit>
void visit_tensor(const at::TensorImpl* tensor, const Visit& visit);

template <typename Visit>
void visit_tensor(const at::TensorBase& tensor, const Visit& visit) {
  if (tensor.defined()) {
    visit_tensor(tensor.unsafeGetTensorImpl(), visit);
  }
}

template <typename Visit>
void visit_tensor(const at::TensorImpl* tensor, const Visit& visit) {
  if (tensor->has_storage()) {
    visit(*tensor->unsafe_storage().unsafeGetStorageImpl());
    return;
  }
  switch (tensor->layout()) {
    case at::kSparse: {
      const auto* sparse = static_cast<const at::SparseTensorImpl*>(tensor);
      visit_tensor(sparse->indices(), visit);
      visit_tensor(sparse->values(), visit);
      return;
    }
    case at::kSparseCsr:
    case at::kSparseCsc:
    case at::kSparseBsr:
    case at::kSparseBsc: {
      const auto* sparse = static_cast<const at::SparseCsrTensorImpl*>(tensor);
      visit_tensor(sparse->compressed_indices(), visit);
      visit_tensor(sparse->plain_indices(), visit);
      visit_tensor(sparse->values(), visit);
      return;
    }
    default: // Wrappers of functorch: the op comes again, unwrapped.
      return;
  }
}

template <typename Visit>
void visit_value(const c10::IValue& value, const Visit& visit) {
  if (value.isTensor()) {
    visit_tensor(value.unsafeToTensorImpl(), visit);
  } else if (value.isList()) {
    for (const c10::IValue& element : value.toListRef()) {
      if (!element.isTensor() && !element.isList() && !element.isTuple() && !element.isNone()) {
        return; // a list of numbers
      }
      visit_value(element, visit);
    }
  } else if (value.isTuple()) {
    for (const c10::IValue& element : value.toTupleRef().elements()) {
      visit_value(element, visit);
    }
  }
}

EntityPtr entity_for_op(c10::StorageImpl& storage, bool fresh) {
  const c10::DeviceType type = storage.device_type();
  if (type != c10::kCUDA && type != c10::kCPU) {
    return nullptr;
  }
  if (HostMark* mark = host_mark(storage)) {
    return mark->entity;
  }
  if (tracks_storages_of(storage.nbytes())) {
    return Pager::get().find_or_track(storage, fresh);
  }
  return Pager::get().in_motion() ? Pager::get().find(storage) : nullptr;
}

/// Nearly all ops are PyTorch's own, and every op comes here twice: no call.
bool is_native(const at::RecordFunction& record) {
  const char* name = record.name();
  return name[0] == 'a' && name[1] == 't' && name[2] == 'e' && name[3] == 'n' && name[4] == ':';
}

/// Whether a record that is not native is an op all the same: these have qualified names.
/// Records of Python's autograd Functions and other regions do not, and those of the autograd
/// engine are its own: whole programs run inside of them (a checkpoint's forward), and what
/// these use must not stay pinned until the end.
bool is_foreign_op(const at::RecordFunction& record) {
  const char* name = record.name();
  return std::strchr(name, ':') != nullptr && std::strncmp(name, "autograd::", 10) != 0;
}

bool is_collective(const at::RecordFunction& op) {
  const char* name = op.name();
  return std::strncmp(name, "c10d::", 6) == 0 || std::strncmp(name, "_c10d", 5) == 0;
}

// --- the callback -------------------------------------------------------------------

void use_inputs(const at::RecordFunction& op, bool native, Frame& now) {
  const size_t first = now.pinned.size();
  // A collective goes on using its tensors on other streams.
  const bool stays = !native && is_collective(op);
  bool noted = false;
  for (const c10::IValue& value : op.inputs()) {
    visit_value(value, [&now, &noted, stays](c10::StorageImpl& storage) {
      if (!noted && storage.device_type() == c10::kCUDA) {
        // Also for what is no entity yet: if it is paged out next, this op comes first.
        if (Device* device = known_device(storage.device())) {
          device->note_current_stream();
        }
        noted = true;
      }
      if (!stays && pinned_lately(now, storage)) {
        return;
      }
      if (EntityPtr entity = entity_for_op(storage, false)) {
        add_pinned(now, storage, std::move(entity));
      }
    });
  }
  if (now.pinned.size() == first) {
    return;
  }
  use_pinned(now.pinned, first, stays);
}

std::unique_ptr<at::ObserverContext> on_op_begin(const at::RecordFunction& op) {
  const bool native = is_native(op);
  if (in_forked_child() || (!native && !is_foreign_op(op))) {
    return nullptr;
  }
  Frame& now = frame();
  if (now.depth++ == 0) {
    now.native = native;
    if (!now.raw.empty()) {
      let_go_of_raw();
    }
    OpClock::get().begin_op();
    if (Pager::get().arrivals().any()) {
      Pager::get().arrivals().settle();
    }
    if (Pager::get().has_finished()) {
      Pager::get().commit_finished();
    }
  }
  use_inputs(op, native, now);
  return nullptr;
}

void track_outputs(const at::RecordFunction& op, Frame& now) {
  for (const c10::IValue& value : op.outputs()) {
    visit_value(value, [&now](c10::StorageImpl& storage) {
      if (pinned_lately(now, storage)) {
        return;
      }
      if (EntityPtr entity = entity_for_op(storage, true)) {
        MemoryPressure::get().record_use(entity);
        add_pinned(now, storage, std::move(entity));
      }
    });
  }
}

void on_op_end(const at::RecordFunction& op, at::ObserverContext*) {
  if (in_forked_child() || (!is_native(op) && !is_foreign_op(op))) {
    return;
  }
  Frame& now = frame();
  if (now.depth == 0) {
    return; // It began before this process was forked, or in a thread's last breath.
  }
  track_outputs(op, now);
  if (--now.depth != 0) {
    return;
  }
  if (now.pinned.empty()) {
    OpClock::get().end_op();
    Chaos::get().after_op();
    return;
  }
  std::vector<EntityPtr> pinned;
  pinned.swap(now.pinned);
  now.storages.clear();
  for (const EntityPtr& entity : pinned) {
    entity->unpin();
  }
  OpClock::get().end_op();
  MemoryPressure::get().after_op(pinned);
  Chaos::get().after_op();
  pinned.clear();
  now.pinned.swap(pinned); // keeps its capacity
}

void install(bool needs_outputs) {
  installed = at::addGlobalCallback(
      at::RecordFunctionCallback(&on_op_begin, &on_op_end)
          .needsInputs(true)
          .needsOutputs(needs_outputs)
          .scopes({at::RecordScope::FUNCTION}));
  is_installed.store(true);
}

void uninstall() {
  at::removeCallback(installed);
  installed = at::INVALID_CALLBACK_HANDLE;
  is_installed.store(false);
}

bool tracking() {
  return tracked_from_bytes.load() != kNotTracking;
}

} // namespace

bool tracks_storages_of(size_t nbytes) noexcept {
  return nbytes >= tracked_from_bytes.load(std::memory_order_relaxed);
}

EntityPtr entity_of_input(c10::StorageImpl& storage) {
  return entity_for_op(storage, false);
}

void use_pinned(const std::vector<EntityPtr>& entities, size_t first, bool stay) {
  for (size_t i = first; i < entities.size(); ++i) {
    Pager::get().call_off_pageout(entities[i]);
  }
  const Device* asked = nullptr;
  bool capturing = false;
  for (size_t i = first; i < entities.size(); ++i) {
    const EntityPtr entity = entities[i]; // the vector may grow meanwhile
    Device& device = find_device_of(*entity);
    if (&device != asked) {
      asked = &device;
      capturing = device.capturing();
      device.note_current_stream();
    }
    if (stay || capturing) {
      entity->pin();
    }
    Pager::get().use(entity);
    MemoryPressure::get().record_use(entity);
  }
}

void hold_raw(const EntityPtr& entity) {
  entity->pin();
  frame().raw.push_back(entity);
}

void let_go_of_raw() {
  std::vector<EntityPtr> raw;
  raw.swap(frame().raw);
  for (const EntityPtr& entity : raw) {
    entity->unpin();
  }
}

bool observe_ops() {
  std::lock_guard<std::mutex> lock(install_mutex);
  if (is_installed.load()) {
    return false;
  }
  install(tracking());
  return true;
}

void stop_observing_if_idle() {
  if (!is_installed.load(std::memory_order_acquire) || tracking() || Pager::get().active()) {
    return;
  }
  std::lock_guard<std::mutex> lock(install_mutex);
  if (is_installed.load() && !tracking() && !Pager::get().active()) {
    uninstall();
  }
}

bool observing_ops() noexcept {
  return is_installed.load();
}

void track_storages(size_t min_bytes) {
  std::lock_guard<std::mutex> lock(install_mutex);
  if (is_installed.load()) {
    uninstall();
  }
  tracked_from_bytes.store(min_bytes);
  install(true);
}

void stop_tracking_storages() {
  {
    std::lock_guard<std::mutex> lock(install_mutex);
    tracked_from_bytes.store(kNotTracking);
    Chaos::get().end();
    if (is_installed.load()) {
      uninstall();
      install(false);
    }
  }
  stop_observing_if_idle();
}

} // namespace torch_lms
