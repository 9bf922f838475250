#pragma once

#include <array>
#include <atomic>
#include <mutex>
#include <string>
#include <vector>

#include <entity/CycleTracker.h>

#include <extension/DeviceWatch.h>

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

/// Note [Room in batches]
/// A program runs ahead of the device until memory is full, and then waits for one
/// page-out after another. If it took each block as soon as it came free, blocks of
/// different sizes would soon be interleaved, and large requests find no free block. So
/// who has to wait, waits until a margin is free as well: neighbours in order of use are
/// mostly neighbours in memory, and join. The margin is paged out once, not each time.
///
/// Prefetches come in batches for the same reason, and leave several times the largest
/// recent allocation free in backward: to fill the last free gigabytes costs more, in
/// page-outs that make room for one large block, than the link gains by it.

/// Keeps the memory of tensors on devices within their limits. (Automatic mode.)
///
/// Thread-safe: every method may be called from any thread. `make_room`,
/// `make_contiguous` and `after_out_of_memory` wait for transfers, so no lock of an
/// allocator may be held.
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

  /// After `make_room`: pages out more, until there is one free block that is large
  /// enough.
  void make_contiguous(Device& device, size_t nbytes);

  /// An allocation of `nbytes` failed though the limit leaves room (fragmentation):
  /// pages out at least as much more. Returns false if nothing was left to page out.
  bool after_out_of_memory(Device& device, size_t nbytes);

  /// An outermost op of the calling thread that used `entities` has ended.
  void after_op(const std::vector<EntityPtr>& entities);

  /// An op uses the entity.
  void record_use(const EntityPtr& entity);
  /// The same entity again, in the same op.
  void note_use() noexcept {
    if (enabled()) {
      cycles_.next_use();
    }
  }

  /// Entities tell where they are.
  void note_resident(const EntityPtr& entity);
  void note_paged_out(const EntityPtr& entity);
  void note_cancelled(const EntityPtr& entity);

  /// What the device is kept within; 0 without a limit.
  size_t limit_bytes(const Device& device) {
    return watch_of(device).limit_bytes();
  }

  /// Why the last page-out failed, in words; empty if none did.
  std::string last_error();

 private:
  DeviceWatch& watch_of(const Device& device);
  DeviceWatch& watch_of(const EntityStorageImpl& entity);
  size_t request_pageouts(DeviceWatch& watch, size_t nbytes);
  size_t page_out(DeviceWatch& watch, const EntityPtr& entity);
  bool free_window(DeviceWatch& watch, size_t nbytes);
  enum class Progress { kMoved, kNothingUnderWay, kFailed };

  Progress wait_for_pageouts(uint64_t* progress);
  bool others_may_let_go(int* tries);
  void page_out_ahead(DeviceWatch& watch, bool backward);
  void page_out_cooled(DeviceWatch& watch, size_t missing_bytes);
  void prefetch_ahead(DeviceWatch& watch, bool backward);
  bool keep_error();

  std::atomic<bool> enabled_{false};
  CycleTracker cycles_;
  std::array<DeviceWatch, kMaxDevices> watches_;
  std::mutex error_mutex_;
  std::string last_error_;
};

} // namespace torch_lms
