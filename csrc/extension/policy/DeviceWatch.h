#pragma once

#include <array>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include <extension/base/Options.h>
#include <extension/memory/Device.h>
#include <extension/policy/PageoutPlan.h>
#include <extension/trace/CycleTracker.h>
#include <extension/transfer/Entity.h>

namespace torch_lms {

/// Note [The order that is kept]
/// To look at all residents and put them in order takes as long as many ops, and under pressure
/// each allocation asks for a few of them. The order changes little from op to op: so it serves for
/// a few ops, and who has been used meanwhile is passed over. Who has become resident meanwhile was
/// needed now, and would come late in it.

/// A resident entity that may go out.
struct Victim {
  uint64_t next_use;
  EntityPtr entity;
};

/// What automatic mode knows of one device: which entities are there and
/// which have left, what ops allocated lately, and how much is to go out.
///
/// Thread-safe: every method may be called from any thread, with and without the GIL. They
/// block on a mutex under which nothing is waited for.
class DeviceWatch {
 public:
  /// `options` outlive it.
  void begin(Device& device, const PolicyOptions& options);
  void end();

  /// 0 without a limit, before `begin` and when the limit has ended.
  size_t limit_bytes() const noexcept {
    Device* device = device_.load(std::memory_order_acquire);
    return device != nullptr ? device->limit_bytes() : 0;
  }
  /// Once it has begun, also for who is still at it when it has ended.
  Device& device() const noexcept {
    return *device_.load(std::memory_order_relaxed);
  }
  /// Room beyond what is asked for: see Note [Room in batches].
  size_t margin_bytes() const noexcept;

  /// An allocation is about to be made, with so much in use before it, and so much paged out.
  void note_allocation(size_t nbytes, size_t used_bytes, size_t out_bytes);
  /// The most that was in use at an allocation since the last `end_cycle`.
  size_t peak_bytes() const noexcept {
    return peak_bytes_.load(std::memory_order_relaxed);
  }
  /// The same, with what was out then, since the last call of this one; 0 if there was no
  /// allocation to note.
  size_t take_recent_peak() noexcept {
    return recent_peak_bytes_.exchange(0, std::memory_order_relaxed);
  }
  /// The most that was in use at an allocation since the last call of this one; 0 without one.
  size_t take_cycle_peak() noexcept {
    return cycle_peak_bytes_.exchange(0, std::memory_order_relaxed);
  }
  /// Whether anything has been allocated since the last call. Cheap.
  bool take_allocated() noexcept;
  /// The largest of the latest large allocations, as far as prefetches give way to it.
  size_t largest_recent_bytes() const noexcept;

  void note_resident(const EntityPtr& entity);
  void note_paged_out(const EntityPtr& entity, uint64_t next_use);

  /// What may go out of what has been used since `eligible_from`: what leaves without a copy first,
  /// unless it is needed soon, and of the rest that which is needed last.
  std::vector<Victim> resident_by_next_use(const CycleTracker& cycles, uint64_t eligible_from);

  /// The first of these, by an order that may be some ops old, which have `nbytes` together, or
  /// all; none that has more than `most_bytes`. See Note [The order that is kept].
  std::vector<EntityPtr> choose_victims(
      const CycleTracker& cycles,
      uint64_t eligible_from,
      size_t nbytes,
      size_t most_bytes);

  /// The entity that should come back first, of those that are expected before `horizon`;
  /// null if there is none, or it is larger than `room_bytes`.
  EntityPtr next_prefetch(const CycleTracker& cycles, uint64_t horizon, size_t room_bytes);
  bool anything_paged_out() const noexcept {
    return paged_out_count_.load(std::memory_order_relaxed) != 0;
  }

  /// The plan, with what calls it: see Note [Planned page-outs].
  void note_request(size_t nbytes);
  void note_cancelled(size_t nbytes);
  void note_stays(size_t nbytes);
  void end_cycle();
  /// What is to go out now according to the plan; 0 most of the time, since looking for
  /// candidates is slow.
  size_t planned_now_bytes();

 private:
  static constexpr size_t kSweepAtLeast = 4096;

  /// What is left of `resident_by_next_use`'s order; the first is the last.
  struct KeptOrder {
    std::vector<std::weak_ptr<Entity>> rest;
    uint64_t op = 0;
    uint64_t cycle = 0;
    uint64_t eligible_from = 0;
  };

  std::vector<EntityPtr> take_kept_locked(
      size_t nbytes,
      size_t most_bytes,
      std::vector<EntityPtr>& passed_over);
  void sweep_locked(std::vector<EntityPtr>& dropped);
  void sort_in_locked(std::vector<EntityPtr>& dropped);
  size_t known_locked() const noexcept {
    return resident_.size() + newly_resident_.size() + paged_out_.size();
  }
  const PolicyOptions& options() const noexcept {
    return *options_.load(std::memory_order_acquire);
  }

  mutable std::mutex mutex_;
  std::atomic<const PolicyOptions*> options_{nullptr}; // read without the mutex
  std::atomic<Device*> device_{nullptr};
  std::atomic<int64_t> seen_budget_bytes_{0};
  std::atomic<size_t> peak_bytes_{0};
  std::atomic<size_t> recent_peak_bytes_{0};
  std::atomic<size_t> cycle_peak_bytes_{0};
  std::atomic<size_t> paged_out_count_{0};
  std::atomic<size_t> largest_recent_bytes_{0};
  // Both may hold entities that are elsewhere by now: checked when they come up.
  std::unordered_map<const Entity*, std::weak_ptr<Entity>> resident_;
  std::vector<std::weak_ptr<Entity>> newly_resident_; // most are gone before anybody asks for them
  std::multimap<uint64_t, std::weak_ptr<Entity>> paged_out_; // by next use
  KeptOrder order_;
  size_t sweep_at_ = kSweepAtLeast;
  std::array<size_t, 32> recent_bytes_{};
  size_t recent_at_ = 0;
  PageoutPlan plan_;
  size_t calls_since_plan_ = 0;
};

} // namespace torch_lms
