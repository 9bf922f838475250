#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <list>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>
#include <c10/core/Device.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/intrusive_ptr.h>

namespace at {
namespace native {

/// Keeps the memory of devices below limits: what no op has used for longest is paged out before an
/// op would exceed one, and comes back by itself when it is used. See Note [A limit in the fork].
/// One object, made on first use, never destroyed.
///
/// Thread-safe: every method may be called from any thread. None needs Python's lock.
class SwapLimit final {
 public:
  struct Stats {
    size_t limit_bytes = 0; ///< Of all devices together.
    size_t exceeded = 0; ///< Ops that found no room below the limit.
    int64_t wait_us = 0; ///< Time that ops waited for page-outs.
  };

  static SwapLimit& get();

  /// From now on, and for storages of at least `min_bytes`; a device's earlier limit is replaced.
  /// Begins to observe ops: no thread may be in one. The environment has to be open. Throws
  /// PageoutRefused for a device whose memory cannot be paged out.
  void set(c10::Device device, size_t limit_bytes, size_t min_bytes);

  /// Ends all limits and forgets all storages. Waits for the page-outs that are under way, and
  /// warns of what failed.
  void clear();

  /// Keeps a storage on its device, with a limit or without: brings it there, if there is room.
  /// As often as `pin` was called, `unpin` has to be, which throws Error where it was not.
  void pin(const Storage& storage);
  void unpin(const Storage& storage);
  bool is_pinned(const Storage& storage);

  Stats stats(bool reset);

 private:
  using StorageKey = c10::StorageImpl*; // unique while its entry holds a weak reference

  struct Limited;

  struct Known {
    explicit Known(c10::weak_intrusive_ptr<c10::StorageImpl> storage)
        : storage(std::move(storage)) {}

    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    size_t nbytes = 0;
    size_t uses = 0; ///< By ops that run.
    size_t pins = 0; ///< By the program.
    uint64_t stays_until = 0; ///< It has been refused: not asked before this op.
    bool leaving = false; ///< Its page-out was asked for, and nothing has used it since.
    bool empty = false; ///< No op has used it since it was made empty.
    Limited* limited = nullptr; ///< In whose list of residents it is; null for none.
    std::list<StorageKey>::iterator place;
  };

  struct Leaving {
    StorageKey storage;
    size_t nbytes;
  };

  struct Limited {
    size_t limit_bytes = 0;
    bool pressed = false; ///< The limit has been met: page out ahead of need.
    std::list<StorageKey> resident; ///< The least recently used first.
    std::deque<Leaving> leaving; ///< In the order of their requests.
    size_t leaving_bytes = 0;
  };

  /// What an op makes, as far as is known, and where.
  struct Growth {
    c10::Device device;
    size_t nbytes;
  };

  /// What an op has met in a storage; no bytes where no limit is for it.
  struct Use {
    size_t nbytes;
    bool is_new;
    bool comes_back;
  };

  struct Frame;
  using Held = std::vector<c10::intrusive_ptr<c10::StorageImpl>>;

  SwapLimit() = default;
  std::unique_ptr<ObserverContext> begin(const RecordFunction& op);
  void end(const RecordFunction& op, const Frame* frame);
  void note_growth(const RecordFunction& op, size_t key);

  Use use(const Storage& storage);
  Known& learn(const Storage& storage);
  void put_last(StorageKey storage, Known& known, Limited& limited);
  void forget(std::unordered_map<StorageKey, Known>::iterator entry);
  void make_room(const Growth& growth);
  void ask(c10::Device device, Limited& limited, size_t arriving_bytes, Held& held);
  void ask_one(StorageKey storage, Limited& limited, Held& held);
  void drop_arrived(Limited& limited, Held& held);
  size_t count_allocated(c10::Device device, const Limited& limited) const;
  bool wait_for_pageouts();
  void sweep();

  std::mutex mutex_; // after a passage of ForkGate, before the environment's
  std::unordered_map<c10::Device, Limited> limited_;
  std::unordered_map<StorageKey, Known> known_;
  std::unordered_map<size_t, Growth> growth_; // of an op with such inputs
  bool observes_ = false; // by `callback_`
  CallbackHandle callback_ = 0;
  size_t min_bytes_ = 0;
  size_t sweep_at_ = 1024;
  uint64_t clock_ = 0; // ops
  uint64_t quiet_until_ = 0; // no page-out is asked for before this op
  Stats stats_;
};

} // namespace native
} // namespace at
