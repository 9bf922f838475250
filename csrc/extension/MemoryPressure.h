#pragma once

#include <array>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <unordered_map>
#include <vector>

#include <entity/CycleTracker.h>

#include <extension/Device.h>
#include <extension/EntityTable.h>

namespace torch_lms {

/// The device of an entity.
Device& find_device_of(const EntityStorageImpl& entity);

/// Note [What goes out, and what comes back]
/// Under pressure the entities that are needed last go out (Belady's rule, by the
/// expectations of Note [The next use]). In a forward these are the activations of the
/// first layers. What comes back first is what is needed first, as memory becomes free,
/// but for a reserve for what the next ops allocate; a prefetch that has not begun is
/// called off before anything goes out for want of room.
///
/// What recurs (parameters) and is still needed in this cycle goes last: it is small beside
/// the activations, and would come back scattered over memory, which fragments it.
///
/// From the second cycle on it is known how much must go out in a forward: entities go as
/// soon as they have cooled, not when memory is full, so that the link is busy from the
/// start. The plan is what went out the last time less what turned out not to be needed.

/// Note [Room in batches]
/// A program runs ahead of the device until memory is full, and then waits for one
/// page-out after another. If it took each block as soon as it came free, blocks of
/// different sizes would soon be interleaved, and large requests find no free block. So
/// who has to wait, waits until a margin is free as well: neighbours in order of use are
/// mostly neighbours in memory, and join. The margin is paged out once, not each time.

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

  /// An op uses the entity.
  void record_use(const EntityPtr& entity);

  /// Entities tell where they are.
  void note_resident(const EntityPtr& entity);
  void note_paged_out(const EntityPtr& entity);
  void note_cancelled(const EntityPtr& entity);

  /// What the device is kept within; 0 without a limit.
  size_t limit_bytes(Device& device);

  /// Why the last page-out failed, in words; empty if none did.
  std::string last_error();

  void seed_chaos(uint64_t seed);
  void chaos(int64_t period);

 private:
  struct Watch {
    std::mutex mutex;
    Device* device = nullptr;
    std::atomic<size_t> limit_bytes{0};
    // Both may hold entities that are elsewhere by now: checked when they come up.
    std::unordered_map<const EntityStorageImpl*, std::weak_ptr<EntityStorageImpl>> resident;
    std::multimap<uint64_t, std::weak_ptr<EntityStorageImpl>> paged_out; // by next use
    std::array<size_t, 32> recent_bytes{}; // of the latest large allocations
    size_t recent_at = 0;
    size_t requested_bytes = 0; // page-outs asked for in this cycle
    size_t planned_bytes = 0; // page-outs that this cycle's forward will need
    size_t peak_bytes = 0; // of what stays when every page-out under way is over
    uint32_t ops_since_plan = 0;
  };
  struct Victim {
    uint64_t next_use;
    EntityPtr entity;
  };

  Watch& watch_of(const Device& device);
  Watch& watch_of(const EntityStorageImpl& entity);
  std::vector<Victim> resident_by_next_use(Watch& watch);
  size_t request_pageouts(Watch& watch, size_t nbytes);
  size_t page_out(Watch& watch, const EntityPtr& entity);
  bool free_window(Watch& watch, size_t nbytes);
  bool wait_for_pageouts(uint64_t* progress);
  void page_out_ahead(Watch& watch, bool backward);
  void follow_plan(Watch& watch);
  void make_plan(Watch& watch);
  void prefetch_ahead(Watch& watch, bool backward);
  EntityPtr next_prefetch(Watch& watch, bool backward, size_t room_bytes);
  void keep_error();
  static size_t margin_bytes(const Watch& watch);
  static size_t largest_recent_bytes(const Watch& watch);

  std::atomic<bool> enabled_{false};
  CycleTracker cycles_;
  std::array<Watch, 65> watches_; // the CPU, then CUDA devices
  std::mutex error_mutex_;
  std::string last_error_;
  std::mutex chaos_mutex_;
  std::mt19937_64 random_;
};

} // namespace torch_lms
