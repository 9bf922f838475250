#include <extension/access/LargeOps.h>

#include <algorithm>
#include <chrono>
#include <set>
#include <string_view>
#include <unordered_set>
#include <utility>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty_strided.h>
#include <c10/util/ScopeExit.h>

#include <extension/access/BelowAutograd.h>
#include <extension/access/Storages.h>
#include <extension/base/Interpreter.h>

namespace torch_lms {
namespace {

constexpr auto kPatience = std::chrono::seconds(30);
constexpr size_t kRefused = SIZE_MAX / 8; // what an op needs that was refused: more than there is

/// The same value without bytes.
c10::IValue without_bytes(const c10::IValue& value) {
  if (value.isTensor() && value.toTensor().defined()) {
    const at::Tensor& tensor = value.toTensor();
    // A subclass would be asked in Python.
    TORCH_CHECK(
        !tensor.key_set().has(c10::DispatchKey::Python) && tensor.layout() == at::kStrided &&
            tensor.has_storage(),
        "no shape function can be asked");
    return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(c10::kMeta));
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> tensors;
    for (const at::Tensor& tensor : value.toTensorVector()) {
      tensors.push_back(without_bytes(tensor).toTensor());
    }
    return tensors;
  }
  return value.isDevice() ? c10::IValue(c10::Device(c10::kMeta)) : value;
}

size_t bytes_behind(const c10::IValue& value, std::set<const c10::StorageImpl*>& seen) {
  size_t nbytes = 0;
  visit_storages(value, [&](c10::StorageImpl& storage) {
    nbytes += seen.insert(&storage).second ? storage.nbytes() : 0;
  });
  return nbytes;
}

/// What the op would make, by PyTorch's shape functions. Throws where there is none.
size_t ask_for_made_bytes(const at::RecordFunction& record) {
  const auto name = record.operator_name();
  const auto op = name.has_value() ? c10::Dispatcher::singleton().findOp(*name) : std::nullopt;
  if (!op.has_value() || op->schema().arguments().size() != inputs_of(record).size()) {
    TORCH_CHECK(false, "no shape function can be asked");
  }
  const BelowAutograd ours;
  std::vector<c10::IValue> stack;
  std::set<const c10::StorageImpl*> seen;
  for (const c10::IValue& input : inputs_of(record)) {
    stack.push_back(without_bytes(input));
    bytes_behind(stack.back(), seen);
  }
  const std::vector<c10::IValue> inputs = stack; // keeps the storages that have been seen
  op->callBoxed(&stack);
  size_t nbytes = 0;
  for (const c10::IValue& output : stack) {
    nbytes += bytes_behind(output, seen);
  }
  return nbytes;
}

bool is_out_or_leaving(EntityState state) {
  return state == EntityState::kPagedOut || is_leaving(state);
}

} // namespace

LargeOps::Key LargeOps::key_of(const at::RecordFunction& record, size_t input_bytes) {
  return std::hash<std::string_view>()(record.name()) ^ (input_bytes * 0x9E3779B97F4A7C15);
}

size_t LargeOps::needed_bytes(
    const at::RecordFunction& record,
    size_t input_bytes,
    size_t limit_bytes) {
  const Key key = key_of(record, input_bytes);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto at = needs_.find(key);
    if (at != needs_.end() && at->second.nbytes == kRefused &&
        at->second.refused_limit_bytes < limit_bytes) {
      needs_.erase(at); // what it needs was never seen
    } else if (at != needs_.end()) {
      return at->second.nbytes;
    }
  }
  size_t nbytes = input_bytes; // where nobody knows, as much as it reads
  try {
    nbytes = ask_for_made_bytes(record);
  } catch (const std::exception&) {
  }
  // Twice: many kernels need as much for themselves.
  std::lock_guard<std::mutex> lock(mutex_);
  return needs_.emplace(key, Need{2 * nbytes, false, 0}).first->second.nbytes;
}

void LargeOps::note_made(const at::RecordFunction& record, size_t input_bytes, size_t made_bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  Need& need = needs_[key_of(record, input_bytes)];
  need.nbytes = need.known ? std::max(need.nbytes, made_bytes) : made_bytes;
  need.known = true;
}

void LargeOps::note_refused(
    const at::RecordFunction& record,
    size_t input_bytes,
    size_t limit_bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  needs_[key_of(record, input_bytes)] = {kRefused, true, limit_bytes};
}

/// Waits until it is out; a plan may have asked for it to go, or to come, before the op. False if
/// it stays on the device: other threads use it, or the host is full.
bool LargeOps::send_out(const Frame& frame, const EntityPtr& entity) {
  if (is_arriving(entity->state())) {
    pager_.use(entity);
  }
  // It is the op's own pins that keep it, one for each time that it is an input.
  const auto pins = std::count(frame.pinned.begin(), frame.pinned.end(), entity.get());
  for (auto i = pins; i > 0; --i) {
    entity->unpin();
  }
  const auto pin_again = c10::make_scope_exit([&] {
    for (auto i = pins; i > 0; --i) {
      entity->pin();
    }
  });
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  bool going = is_out_or_leaving(entity->state()) || pager_.requests().evict(entity);
  uint64_t progress = pager_.out_queue().progress();
  while (going && entity->state() != EntityState::kPagedOut) {
    progress = pager_.out_queue().wait_for_progress(progress, 1000);
    pager_.commit_finished();
    going =
        entity->state() != EntityState::kResident && std::chrono::steady_clock::now() < deadline;
  }
  return going;
}

/// False if it stays on the device.
bool LargeOps::serve_from_host(Frame& frame, const EntityPtr& entity) {
  if (!send_out(frame, entity) || !entity->serve()) {
    return false;
  }
  frame.served.push_back(entity.get());
  pager_.note_served(entity);
  return true;
}

bool LargeOps::make_fit(const at::RecordFunction& record, Frame& frame, size_t first) {
  const auto own = frame.pinned.begin() + static_cast<std::ptrdiff_t>(first);
  Device& device = (*own)->device();
  std::vector<Entity*> inputs;
  std::unordered_set<const Entity*> seen;
  size_t input_bytes = 0;
  std::for_each(own, frame.pinned.end(), [&](Entity* entity) {
    if (&entity->device() == &device && seen.insert(entity).second) {
      input_bytes += entity->nbytes();
      inputs.push_back(entity);
    }
  });
  const size_t made = needed_bytes(record, input_bytes, device.limit_bytes());
  if (device.capturing() || input_bytes + made <= device.limit_bytes() / 2) {
    return false;
  }
  const MemoryReport held = policy_.report(device);
  const size_t stays = held.fixed_bytes + held.unseen_bytes + held.other_bytes;
  const size_t left = device.limit_bytes() - std::min(device.limit_bytes(), stays);
  if (input_bytes + made <= left || !policy_.wakefulness().may_vacate()) {
    return false;
  }
  // Ops around this one have their addresses: those stay.
  const auto stays_there = [&](Entity* entity) {
    return std::find(frame.pinned.begin(), own, entity) != own;
  };
  inputs.erase(std::remove_if(inputs.begin(), inputs.end(), stays_there), inputs.end());
  const WithoutGil no_gil;
  std::sort(inputs.begin(), inputs.end(), [](const Entity* a, const Entity* b) {
    return a->nbytes() > b->nbytes();
  });
  for (Entity* entity : inputs) {
    if (input_bytes + made <= left) {
      break;
    }
    if (serve_from_host(frame, entity_of(entity->shared_from_this()))) {
      input_bytes -= entity->nbytes();
    }
  }
  return true;
}

} // namespace torch_lms
