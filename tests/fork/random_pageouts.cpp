// Storages of a running program go out at random between its ops. See random_pageouts.py.
//
// Note [Between ops]
//   The fork's one limit is a raw pointer that was taken before a page-out: nothing may go while
//   anything uses it. A callback of at::RecordFunction sees ops begin and end on every thread, and
//   storages as they come by: also those that only autograd keeps. Python is between two ops when
//   the interpreter of the main thread comes to a pending call, with its lock held, and no thread
//   is inside of an op; autograd is, before each step of its engine. There, and with new ops kept
//   waiting at the gate, storages are paged out. C++ code of PyTorch outside of ops that fills a
//   new tensor through a pointer does so with Python's lock held: what no op but its factory has
//   seen stays.

#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <random>
#include <string>
#include <unordered_map>
#include <vector>

#include <ATen/record_function.h>
#include <c10/core/impl/Error.h>
#include <c10/core/impl/SwapEnvironment.h>

namespace py = pybind11;

namespace {

using c10::StorageImpl;

constexpr size_t kRecent = 32;

thread_local int64_t ops_of_thread = 0;

bool begins_with(const char* name, const char* text) {
  return std::strncmp(name, text, std::strlen(text)) == 0;
}

bool is_step_of_engine(const at::RecordFunction& op) {
  return begins_with(op.name(), "autograd::engine::evaluate_function");
}

bool only_allocates(const at::RecordFunction& op) {
  return begins_with(op.name(), "aten::empty") || begins_with(op.name(), "aten::new_empty");
}

struct Known {
  c10::weak_intrusive_ptr<StorageImpl> storage;
  bool stays = false; // its address has been given away, or it was refused once
};

/// The storages that have been seen. Thread-safe.
class KnownStorages {
 public:
  void note(const c10::Storage& storage, bool stays = false) {
    std::lock_guard<std::mutex> lock(mutex_);
    StorageImpl* key = storage.unsafeGetStorageImpl();
    const auto found = positions_.find(key);
    size_t position = known_.size();
    if (found != positions_.end()) {
      position = found->second;
    } else {
      sweep_locked();
      position = known_.size();
      known_.push_back(Known{storage.getWeakStorageImpl()});
      positions_.emplace(key, position);
    }
    known_[position].stays = known_[position].stays || stays;
    recent_[recent_count_++ % kRecent] = key;
  }

  /// One of those that came by last, or of all. Null if it is gone or has to stay.
  c10::intrusive_ptr<StorageImpl> pick(std::mt19937_64& random, bool recent) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (known_.empty()) {
      return {};
    }
    size_t position = random() % known_.size();
    if (recent) {
      const auto found = positions_.find(recent_[random() % std::min(kRecent, recent_count_)]);
      if (found == positions_.end()) {
        return {};
      }
      position = found->second;
    }
    const Known& known = known_[position];
    return known.stays ? c10::intrusive_ptr<StorageImpl>() : known.storage.lock();
  }

 private:
  void sweep_locked() {
    if (known_.size() < sweep_at_) {
      return;
    }
    std::vector<Known> alive;
    std::unordered_map<StorageImpl*, size_t> positions;
    for (const auto& entry : positions_) {
      Known& known = known_[entry.second];
      if (!known.storage.expired()) {
        positions.emplace(entry.first, alive.size());
        alive.push_back(std::move(known));
      }
    }
    known_ = std::move(alive);
    positions_ = std::move(positions);
    sweep_at_ = std::max(size_t{256}, 2 * known_.size());
  }

  std::mutex mutex_;
  std::vector<Known> known_;
  std::unordered_map<StorageImpl*, size_t> positions_;
  std::array<StorageImpl*, kRecent> recent_{};
  size_t recent_count_ = 0;
  size_t sweep_at_ = 256;
};

class RandomPageouts {
 public:
  static RandomPageouts& get() {
    static auto* self = new RandomPageouts(); // threads may outlive everything else
    return *self;
  }

  void begin(uint64_t seed) {
    std::lock_guard<std::mutex> gate(gate_);
    random_.seed(seed);
    open_locked();
    if (!watching_) {
      watching_ = true;
      at::addGlobalCallback(
          at::RecordFunctionCallback(&RandomPageouts::on_start, &RandomPageouts::on_end)
              .needsInputs(true)
              .needsOutputs(true)
              .scopes(
                  {at::RecordScope::FUNCTION,
                   at::RecordScope::BACKWARD_FUNCTION,
                   at::RecordScope::TORCHSCRIPT_FUNCTION}));
    }
  }

  void end() {
    if (in_child_.load()) {
      return;
    }
    std::lock_guard<std::mutex> gate(gate_);
    close_locked();
  }

  void reseed(uint64_t seed) {
    std::lock_guard<std::mutex> gate(gate_);
    random_.seed(seed);
  }

  void keep(const c10::Storage& storage) {
    if (!in_child_.load()) {
      known_.note(storage, /*stays=*/true);
    }
  }

  void pause(int64_t by) {
    paused_.fetch_add(by);
  }

  uint64_t times() const {
    return times_.load();
  }
  uint64_t requests() const {
    return requests_.load();
  }
  std::string failure() {
    std::lock_guard<std::mutex> gate(gate_);
    return failure_;
  }

  // Around a fork everything is resident and nothing goes out. A lock must not be held meanwhile:
  // other threads may get Python's lock and wait for ours. So the child, where a lock may be held
  // for good, takes none.
  void before_fork() {
    std::lock_guard<std::mutex> gate(gate_);
    was_running_ = running_.load();
    close_locked();
  }
  void after_fork_in_parent() {
    std::lock_guard<std::mutex> gate(gate_);
    if (was_running_) {
      open_locked();
    }
  }
  void after_fork_in_child() {
    in_child_.store(true);
  }

 private:
  static std::unique_ptr<at::ObserverContext> on_start(const at::RecordFunction& op) {
    RandomPageouts& self = get();
    if (is_step_of_engine(op)) {
      if (ops_of_thread == 0 && self.running_.load()) {
        py::gil_scoped_acquire python;
        self.between_ops();
      }
      return nullptr;
    }
    if (ops_of_thread++ == 0) {
      self.threads_in_ops_.fetch_add(1);
      if (self.running_.load()) {
        std::lock_guard<std::mutex> gate(
            self.gate_); // until those who did not see this op are done
      }
    }
    self.note_all(op.inputs());
    return nullptr;
  }

  static void on_end(const at::RecordFunction& op, at::ObserverContext*) {
    if (is_step_of_engine(op)) {
      return;
    }
    RandomPageouts& self = get();
    if (!only_allocates(op)) {
      self.note_all(op.outputs());
    }
    if (--ops_of_thread == 0) {
      self.threads_in_ops_.fetch_sub(1);
      if (self.running_.load() && !self.pending_.exchange(true) &&
          Py_AddPendingCall(&RandomPageouts::on_pending_call, nullptr) != 0) {
        self.pending_.store(false);
      }
    }
  }

  static int on_pending_call(void*) {
    get().pending_.store(false);
    get().between_ops();
    return 0;
  }

  template <typename Values>
  void note_all(const Values& values) {
    if (running_.load()) {
      for (const c10::IValue& value : values) {
        note(value);
      }
    }
  }

  void note(const c10::IValue& value) {
    if (value.isTensor()) {
      const at::Tensor& tensor = value.toTensor();
      if (tensor.defined() && tensor.has_storage() && tensor.storage()) {
        known_.note(tensor.storage());
      }
    } else if (value.isTensorList() || value.isOptionalTensorList()) {
      for (const c10::IValue& item : value.toListRef()) {
        note(item);
      }
    }
  }

  /// Python's lock is held.
  void between_ops() {
    if (!running_.load()) {
      return;
    }
    std::lock_guard<std::mutex> gate(gate_);
    if (!running_.load() || paused_.load() != 0 || threads_in_ops_.load() != 0) {
      return;
    }
    times_.fetch_add(1);
    try {
      const uint64_t dice = random_();
      for (size_t i = 0; i < 6; ++i) {
        page_out(known_.pick(random_, /*recent=*/i < 4));
      }
      auto& environment = c10::impl::SwapEnvironment::get();
      if (dice % 2 == 0) {
        environment
            .wait_pending_pageouts(); // these are out; others are on their way when they are used
      }
      if (dice % 8 < 2) {
        if (const auto storage = known_.pick(random_, /*recent=*/true)) {
          environment.prefetch(*storage);
        }
      }
    } catch (const std::exception& error) {
      failure_ = error.what();
    }
  }

  void page_out(c10::intrusive_ptr<StorageImpl> storage) {
    if (!storage || storage->nbytes() == 0 || storage->device_type() == c10::DeviceType::Meta) {
      return;
    }
    try {
      requests_.fetch_add(c10::impl::SwapEnvironment::get().pageout(*storage) ? 1 : 0);
    } catch (const torch_lms::PageoutRefused&) {
      keep(c10::Storage(std::move(storage)));
    }
  }

  void open_locked() {
    auto& environment = c10::impl::SwapEnvironment::get();
    if (!environment.is_open()) {
      environment.open(0);
      environment.prefetch_all();
    }
    running_.store(true);
  }

  void close_locked() {
    running_.store(false);
    auto& environment = c10::impl::SwapEnvironment::get();
    if (environment.is_open()) {
      environment.close();
    }
  }

  std::mutex
      gate_; // held by the first op of a thread as it begins, and while storages are paged out
  std::mt19937_64 random_;
  std::string failure_;
  bool watching_ = false;
  bool was_running_ = false;
  KnownStorages known_;
  std::atomic<bool> running_{false};
  std::atomic<bool> pending_{false};
  std::atomic<bool> in_child_{false};
  std::atomic<int64_t> paused_{0};
  std::atomic<int64_t> threads_in_ops_{0};
  std::atomic<uint64_t> times_{0};
  std::atomic<uint64_t> requests_{0};
};

/// The storage behind Python's `storage._cdata`.
c10::Storage storage_at(uintptr_t address) {
  auto* impl = reinterpret_cast<StorageImpl*>(address);
  return c10::Storage(c10::intrusive_ptr<StorageImpl>::reclaim_copy(impl));
}

} // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("begin", [](uint64_t seed) { RandomPageouts::get().begin(seed); });
  module.def("end", [] { RandomPageouts::get().end(); });
  module.def("reseed", [](uint64_t seed) { RandomPageouts::get().reseed(seed); });
  module.def("pause", [] { RandomPageouts::get().pause(1); });
  module.def("resume", [] { RandomPageouts::get().pause(-1); });
  module.def("keep_tensor", [](const at::Tensor& tensor) {
    if (tensor.has_storage() && tensor.storage()) {
      RandomPageouts::get().keep(tensor.storage());
    }
  });
  module.def(
      "keep_storage", [](uintptr_t address) { RandomPageouts::get().keep(storage_at(address)); });
  module.def("before_fork", [] { RandomPageouts::get().before_fork(); });
  module.def("after_fork_in_parent", [] { RandomPageouts::get().after_fork_in_parent(); });
  module.def("after_fork_in_child", [] { RandomPageouts::get().after_fork_in_child(); });
  module.def("times", [] { return RandomPageouts::get().times(); });
  module.def("requests", [] { return RandomPageouts::get().requests(); });
  module.def("failure", [] { return RandomPageouts::get().failure(); });
}
