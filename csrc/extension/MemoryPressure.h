#pragma once

#include <array>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <queue>
#include <random>
#include <vector>

#include <extension/Device.h>
#include <extension/EntityTable.h>

namespace torch_lms {

/// The device of an entity.
Device& find_device_of(const EntityStorageImpl& entity);

/// Note [What goes out, and what comes back]
/// Under pressure the least recently used entities go out. In a forward pass these
/// are the activations of the first layers, which backward needs last; in backward,
/// whose order is the reverse, the least recently used are still those that are
/// needed last, because a page-in does not count as a use. So one order serves
/// both, and it is the order of Belady's algorithm for a forward and its backward.
///
/// What comes back first in backward is what was used last: as memory becomes
/// free, paged-out entities are prefetched in falling order of use. Outside of
/// backward (inference, an optimizer) programs repeat themselves: after a fault,
/// the entities used after it the last time are prefetched, in rising order.
/// Room is kept free for what the next ops allocate (`reserve`); a prefetch that
/// has not begun is called off before anything goes out for want of room.

/// Keeps the memory of tensors on a device within a limit. (Automatic mode.)
///
/// Thread-safe: every method may be called from any thread. `make_room` and
/// `after_out_of_memory` wait for transfers, so no lock of an allocator may be held.
class MemoryPressure {
 public:
  static MemoryPressure& get();

  /// Begins to keep `device` within `limit_bytes`, or changes the limit.
  void enable(Device& device, size_t limit_bytes);
  void disable();
  bool enabled() const noexcept {
    return enabled_.load(std::memory_order_relaxed);
  }

  /// Before an allocation of `nbytes`: pages out until it fits the limit. Returns
  /// false if it does not fit whatever is paged out.
  bool make_room(Device& device, size_t nbytes);

  /// After `make_room`: pages out more, up to twice `nbytes`, until there is one free
  /// block that is large enough. Page-outs in order of use free neighbours.
  void make_contiguous(Device& device, size_t nbytes);

  /// An allocation of `nbytes` failed though the limit leaves room (fragmentation):
  /// pages out at least as much more. Returns false if nothing was left to page out.
  bool after_out_of_memory(Device& device, size_t nbytes);

  /// An outermost op of the calling thread that used `entities` has ended.
  void after_op(const std::vector<EntityPtr>& entities);

  /// Entities tell where they are.
  void note_resident(const EntityPtr& entity);
  void note_paged_out(const EntityPtr& entity);
  void note_fault(const EntityPtr& entity);

  /// What the device is kept within; 0 without a limit.
  size_t limit_bytes(Device& device);

  /// Why the last page-out failed, in words; empty if none did.
  std::string last_error();

  void seed_chaos(uint64_t seed);
  void chaos(int64_t period);

 private:
  using Use = uint64_t;
  struct Candidate {
    Use use;
    std::weak_ptr<EntityStorageImpl> entity;
    bool operator>(const Candidate& other) const noexcept {
      return use > other.use;
    }
  };
  struct Watch {
    std::mutex mutex;
    Device* device = nullptr;
    std::atomic<size_t> limit_bytes{0};
    // Entries may be stale: they are checked, and put right, when they come up.
    std::priority_queue<Candidate, std::vector<Candidate>, std::greater<Candidate>> resident;
    std::map<Use, std::weak_ptr<EntityStorageImpl>> paged_out;
    std::array<size_t, 32> recent_bytes{}; // of the latest large allocations
    size_t recent_at = 0;
    Use fault = 0; // of the last fault outside of backward, until it is served
    Use backward_began = 0;
    Use backward_ended = 0;
  };

  Watch& watch_of(const Device& device);
  Watch& watch_of(const EntityStorageImpl& entity);
  size_t request_pageouts(Watch& watch, size_t nbytes);
  EntityPtr next_victim(Watch& watch, std::vector<Candidate>& set_aside);
  bool wait_for_pageouts(uint64_t* progress);
  void page_out_ahead(Watch& watch);
  void prefetch_ahead(Watch& watch);
  EntityPtr next_prefetch(Watch& watch, bool backward, size_t room_bytes);
  void note_backward(Watch& watch, bool backward);
  void keep_error();
  static size_t margin_bytes(const Watch& watch);
  static size_t reserve_bytes(const Watch& watch);

  std::atomic<bool> enabled_{false};
  std::array<Watch, 65> watches_; // the CPU, then CUDA devices
  std::mutex error_mutex_;
  std::string last_error_;
  std::mutex chaos_mutex_;
  std::mt19937_64 random_;
};

} // namespace torch_lms
