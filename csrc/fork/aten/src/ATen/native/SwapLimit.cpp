#include <ATen/native/SwapLimit.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <exception>
#include <iterator>
#include <new>
#include <utility>

#include <ATen/core/Tensor.h>
#include <c10/core/impl/Error.h>
#include <c10/core/impl/ForkGate.h>
#include <c10/core/impl/SwapEnvironment.h>
#include <c10/util/Exception.h>
#include <c10/util/hash.h>

namespace at {
namespace native {
namespace {

// Note [A limit in the fork]
// An observer sees every op of every thread before it runs, with its inputs. What an op uses stays
// until the outermost op of its thread is over: a kernel may hold the address of what it has made
// while it calls other ops. Before the op, the least recently used of the others go out until what
// it will make fits below the limit: as much as it made the last time with such inputs, or as its
// largest input. Who meets the limit waits for the copies; once it has been met, page-outs are
// asked for an eighth of the limit ahead. A storage that is used again comes back as after a
// page-out by hand, on access.
//
// What has been made empty stays until an op has used it: somebody may fill it through its address,
// and run ops meanwhile, as `torch.tensor` does with the elements of a list.
//
// A limit is soft: what one op needs at once, with what has been refused and what the host has no
// room for, may exceed it. Then the op runs all the same, and `Stats::exceeded` counts it.

constexpr char kOwnOps[] = "storage_swap::";
constexpr size_t kAhead = 8; // a part of the limit
constexpr uint64_t kOpsBeforeNextTry = 1000; // of what has been refused
constexpr size_t kMaxGrowths = size_t{1} << 16;

struct OpsOfThread {
  size_t depth = 0;
  std::vector<c10::StorageImpl*> used; // until the outermost is over
};
thread_local OpsOfThread ops_of_thread;

c10::impl::SwapEnvironment& environment() {
  return c10::impl::SwapEnvironment::get();
}

template <typename Visit>
void visit_storages(const IValue& value, const Visit& visit) {
  if (value.isTensor()) {
    const Tensor& tensor = value.toTensor();
    if (tensor.defined() && tensor.has_storage()) {
      visit(tensor.unsafeGetTensorImpl()->unsafe_storage());
    }
  } else if (value.isList()) {
    for (const IValue& element : value.toListRef()) {
      visit_storages(element, visit);
    }
  }
}

bool makes_empty(const RecordFunction& op) {
  static constexpr const char* kPrefixes[] = {"aten::empty", "aten::new_empty"};
  return std::any_of(std::begin(kPrefixes), std::end(kPrefixes), [&](const char* prefix) {
    return std::strncmp(op.name(), prefix, std::strlen(prefix)) == 0;
  });
}

/// Of what an op is asked to make, where its inputs do not say: the numbers in lists, as sizes are.
size_t hash_sizes(const RecordFunction& op) {
  size_t hash = 0;
  for (const IValue& input : op.inputs()) {
    if (input.isIntList()) {
      for (const IValue& size : input.toListRef()) {
        hash = c10::hash_combine(hash, static_cast<size_t>(size.toInt()));
      }
    }
  }
  return hash;
}

} // namespace

struct SwapLimit::Frame final : ObserverContext {
  explicit Frame(size_t key) : key(key) {}
  const size_t key; // in `growth_`
};

SwapLimit& SwapLimit::get() {
  static auto* limit = new SwapLimit();
  return *limit;
}

void SwapLimit::set(c10::Device device, size_t limit_bytes, size_t min_bytes) {
  environment().allocated_bytes(device); // throws where its memory cannot be paged out
  const c10::impl::ForkGate::Passage passage;
  std::lock_guard<std::mutex> lock(mutex_);
  limited_[device].limit_bytes = limit_bytes;
  min_bytes_ = std::max<size_t>(min_bytes, 1);
  quiet_until_ = 0;
  if (!observes_) {
    auto begin = [](const RecordFunction& op) { return get().begin(op); };
    auto end = [](const RecordFunction& op, ObserverContext* context) {
      get().end(op, static_cast<Frame*>(context));
    };
    callback_ = addGlobalCallback(RecordFunctionCallback(begin, end)
                                      .needsInputs(true)
                                      .needsOutputs(true)
                                      .scopes({RecordScope::FUNCTION}));
    observes_ = true;
  }
}

void SwapLimit::clear() {
  wait_for_pageouts(); // who ends the environment later is not to be told what failed here
  const c10::impl::ForkGate::Passage passage;
  std::lock_guard<std::mutex> lock(mutex_);
  if (observes_) {
    removeCallback(callback_);
    observes_ = false;
  }
  for (auto it = known_.begin(); it != known_.end();) {
    const auto here = it++;
    here->second.limited = nullptr;
    here->second.leaving = false;
    if (here->second.pins == 0 && here->second.uses == 0) { // ops that run still end here
      known_.erase(here);
    }
  }
  limited_.clear();
  growth_.clear();
}

void SwapLimit::pin(const Storage& storage) {
  {
    const c10::impl::ForkGate::Passage passage;
    std::lock_guard<std::mutex> lock(mutex_);
    ++learn(storage).pins;
  }
  try {
    storage.unsafeGetStorageImpl()->data();
  } catch (const c10::Error&) { // no room: it comes in when it is used
  }
}

void SwapLimit::unpin(const Storage& storage) {
  const c10::impl::ForkGate::Passage passage;
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = known_.find(storage.unsafeGetStorageImpl());
  if (found == known_.end() || found->second.pins == 0) {
    throw torch_lms::Error(
        "expected a tensor whose storage is pinned, found one that is not; call unpin once for "
        "each pin");
  }
  Known& known = found->second;
  if (--known.pins == 0 && known.uses == 0 && known.limited == nullptr && !known.leaving) {
    known_.erase(found);
  }
}

bool SwapLimit::is_pinned(const Storage& storage) {
  const c10::impl::ForkGate::Passage passage;
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = known_.find(storage.unsafeGetStorageImpl());
  return found != known_.end() && found->second.pins != 0;
}

SwapLimit::Stats SwapLimit::stats(bool reset) {
  const c10::impl::ForkGate::Passage passage;
  std::lock_guard<std::mutex> lock(mutex_);
  Stats stats = stats_;
  for (const auto& limited : limited_) {
    stats.limit_bytes += limited.second.limit_bytes;
  }
  if (reset) {
    stats_ = Stats();
  }
  return stats;
}

// --- around an op -------------------------------------------------------------------

std::unique_ptr<ObserverContext> SwapLimit::begin(const RecordFunction& op) {
  ++ops_of_thread.depth; // `end` comes also where this throws
  if (std::strncmp(op.name(), kOwnOps, sizeof(kOwnOps) - 1) == 0) {
    return nullptr; // requests by hand use no bytes
  }
  Growth growth{c10::Device(c10::DeviceType::CPU), 0};
  size_t input_bytes = 0;
  size_t coming_bytes = 0;
  const auto visit = [&](const Storage& storage) {
    const Use met = use(storage);
    if (met.nbytes != 0) {
      growth = Growth{storage.device(), std::max(growth.nbytes, met.nbytes)};
      input_bytes += met.nbytes;
      coming_bytes += met.comes_back ? met.nbytes : 0;
    }
  };
  size_t key = 0;
  {
    const c10::impl::ForkGate::Passage passage;
    std::lock_guard<std::mutex> lock(mutex_);
    ++clock_;
    for (const IValue& input : op.inputs()) {
      visit_storages(input, visit);
    }
    key = c10::hash_combine(reinterpret_cast<size_t>(op.name()), input_bytes);
    key = c10::hash_combine(key, hash_sizes(op));
    const auto seen = growth_.find(key);
    growth = seen != growth_.end() ? seen->second : growth;
  }
  growth.nbytes += coming_bytes;
  make_room(growth);
  return std::make_unique<Frame>(key);
}

void SwapLimit::end(const RecordFunction& op, const Frame* frame) {
  const c10::impl::ForkGate::Passage passage;
  std::lock_guard<std::mutex> lock(mutex_);
  try {
    if (frame != nullptr) { // null also where `begin` found no memory
      note_growth(op, frame->key);
    }
  } catch (const std::bad_alloc&) { // what is not known does not move
  }
  if (--ops_of_thread.depth == 0) {
    for (const StorageKey storage : ops_of_thread.used) {
      --known_.at(storage).uses;
    }
    ops_of_thread.used.clear();
  }
  if (known_.size() >= sweep_at_) {
    sweep();
  }
}

void SwapLimit::note_growth(const RecordFunction& op, size_t key) {
  Growth growth{c10::Device(c10::DeviceType::CPU), 0};
  const bool empty = makes_empty(op);
  for (const IValue& output : op.outputs()) {
    visit_storages(output, [&](const Storage& storage) {
      const Use made = use(storage);
      if (made.is_new) {
        growth = Growth{storage.device(), growth.nbytes + made.nbytes};
      }
      if (empty && made.nbytes != 0) {
        known_.at(storage.unsafeGetStorageImpl()).empty = true;
      }
    });
  }
  if (growth_.size() >= kMaxGrowths) {
    growth_.clear();
  }
  growth_.emplace(key, growth).first->second = growth;
}

SwapLimit::Use SwapLimit::use(const Storage& storage) {
  const StorageKey key = storage.unsafeGetStorageImpl();
  const auto found = limited_.find(storage.device());
  if (found == limited_.end() || storage.nbytes() < min_bytes_) {
    return Use{0, false, false};
  }
  auto entry = known_.find(key);
  const bool is_new = entry == known_.end();
  Known& known = is_new ? learn(storage) : entry->second;
  ops_of_thread.used.push_back(key);
  ++known.uses;
  if (known.limited == nullptr) {
    put_last(key, known, found->second);
  } else {
    std::list<StorageKey>& resident = found->second.resident;
    resident.splice(resident.end(), resident, known.place);
  }
  known.nbytes = storage.nbytes();
  known.empty = false;
  return Use{known.nbytes, is_new, std::exchange(known.leaving, false)};
}

SwapLimit::Known& SwapLimit::learn(const Storage& storage) {
  Known known(storage.getWeakStorageImpl());
  return known_.emplace(storage.unsafeGetStorageImpl(), std::move(known)).first->second;
}

void SwapLimit::put_last(StorageKey key, Known& known, Limited& limited) {
  known.place = limited.resident.insert(limited.resident.end(), key);
  known.limited = &limited;
}

void SwapLimit::forget(std::unordered_map<StorageKey, Known>::iterator entry) {
  if (entry->second.limited != nullptr) {
    entry->second.limited->resident.erase(entry->second.place);
  }
  known_.erase(entry);
}

/// Forgets the dead.
void SwapLimit::sweep() {
  for (auto it = known_.begin(); it != known_.end();) {
    const auto here = it++;
    if (here->second.uses == 0 && here->second.storage.expired()) {
      forget(here);
    }
  }
  sweep_at_ = std::max<size_t>(1024, 2 * known_.size());
}

// --- room -----------------------------------------------------------------------------

void SwapLimit::make_room(const Growth& growth) {
  Held held; // the last reference to a storage may free it, for which other locks are taken
  for (;;) {
    {
      const c10::impl::ForkGate::Passage passage;
      std::lock_guard<std::mutex> lock(mutex_);
      const auto found = limited_.find(growth.device);
      if (found == limited_.end()) {
        return;
      }
      Limited& limited = found->second;
      drop_arrived(limited, held);
      ask(growth.device, limited, growth.nbytes, held);
      if (count_allocated(growth.device, limited) + growth.nbytes <= limited.limit_bytes) {
        return;
      }
      if (limited.leaving.empty()) {
        ++stats_.exceeded;
        return;
      }
    }
    held.clear();
    if (!wait_for_pageouts()) {
      return;
    }
  }
}

/// Asks for page-outs until what is left will fit, or nothing is left that may go.
void SwapLimit::ask(c10::Device device, Limited& limited, size_t arriving_bytes, Held& held) {
  const size_t wanted_bytes = count_allocated(device, limited) + arriving_bytes;
  limited.pressed = limited.pressed || wanted_bytes > limited.limit_bytes;
  const size_t ahead_bytes = limited.pressed ? limited.limit_bytes / kAhead : 0;
  const size_t target_bytes = limited.limit_bytes - ahead_bytes;
  auto place = limited.resident.begin();
  while (place != limited.resident.end() && clock_ >= quiet_until_ &&
         wanted_bytes > target_bytes + limited.leaving_bytes) {
    ask_one(*place++, limited, held);
  }
}

void SwapLimit::ask_one(StorageKey key, Limited& limited, Held& held) {
  const auto found = known_.find(key);
  Known& known = found->second;
  if (known.uses != 0 || known.pins != 0 || known.empty || clock_ < known.stays_until) {
    return;
  }
  auto storage = known.storage.lock();
  if (storage == nullptr) {
    forget(found);
    return;
  }
  held.push_back(storage);
  try {
    environment().pageout(*storage);
    limited.leaving.push_back(Leaving{key, known.nbytes});
    limited.leaving_bytes += known.nbytes;
    limited.resident.erase(known.place);
    known.limited = nullptr;
    known.leaving = true;
  } catch (const torch_lms::PageoutRefused&) {
    known.stays_until = clock_ + kOpsBeforeNextTry;
  } catch (const torch_lms::Error&) { // a closed environment, a forked child
    quiet_until_ = clock_ + kOpsBeforeNextTry;
  }
}

/// Forgets page-outs that are over; what is here all the same may be asked for again.
void SwapLimit::drop_arrived(Limited& limited, Held& held) {
  while (!limited.leaving.empty()) {
    const Leaving front = limited.leaving.front();
    const auto found = known_.find(front.storage);
    if (found != known_.end() && found->second.leaving) {
      held.push_back(found->second.storage.lock());
      const auto state = held.back() == nullptr ? torch_lms::EntityState::kPagedOut
                                                : environment().state(*held.back());
      if (state == torch_lms::EntityState::kOutQueued ||
          state == torch_lms::EntityState::kPagingOut) {
        return;
      }
      if (state != torch_lms::EntityState::kPagedOut) { // it failed, or was used unobserved
        Known& known = found->second;
        put_last(front.storage, known, limited);
        known.leaving = false;
        known.stays_until = clock_ + kOpsBeforeNextTry;
      }
    }
    limited.leaving.pop_front();
    limited.leaving_bytes -= front.nbytes;
  }
}

size_t SwapLimit::count_allocated(c10::Device device, const Limited& limited) const {
  const int64_t counted = environment().allocated_bytes(device);
  if (counted >= 0) {
    return static_cast<size_t>(counted);
  }
  size_t nbytes = limited.leaving_bytes; // of what is known, where the allocator does not count
  for (const StorageKey storage : limited.resident) {
    const Known& known = known_.at(storage);
    nbytes += known.storage.expired() ? 0 : known.nbytes;
  }
  return nbytes;
}

/// Returns whether they went well.
bool SwapLimit::wait_for_pageouts() {
  const auto begun = std::chrono::steady_clock::now();
  bool done = true;
  try {
    environment().wait_pending_pageouts();
  } catch (const std::exception& error) {
    done = false;
    TORCH_WARN(
        "torch_lms: expected room for what a limit pages out, found none; the tensors stay on "
        "their device, which may exceed its limit: ",
        error.what());
  }
  const auto waited = std::chrono::steady_clock::now() - begun;
  const c10::impl::ForkGate::Passage passage;
  std::lock_guard<std::mutex> lock(mutex_);
  stats_.wait_us += std::chrono::duration_cast<std::chrono::microseconds>(waited).count();
  if (!done) {
    ++stats_.exceeded;
    quiet_until_ = clock_ + kOpsBeforeNextTry;
  }
  return done;
}

} // namespace native
} // namespace at
