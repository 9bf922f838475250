#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include <extension/base/Options.h>
#include <extension/memory/Devices.h>
#include <extension/memory/Room.h>
#include <extension/policy/CrowdedWindow.h>
#include <extension/policy/DeviceWatch.h>
#include <extension/policy/Placeholders.h>
#include <extension/trace/CycleTracker.h>
#include <extension/transfer/Pager.h>

namespace torch_lms {

/// Who has ops shown to the policy (`OpCallbacks`).
class OpFeed {
 public:
  virtual ~OpFeed() = default;
  /// From now on ops tell what they use and what they make.
  virtual void start() = 0;
  /// Ops need not tell any more.
  virtual void stop() = 0;
};

/// Who wants to know how the program goes on (`Planning`).
class PolicyListener {
 public:
  virtual ~PolicyListener() = default;
  /// A backward has ended, and something else begun, with an op that has just ended.
  virtual void backward_ended() = 0;
  /// An op that runs on this thread has begun to wait for room, or gone on.
  virtual void wait_begins(Device& device) = 0;
  virtual void wait_ends(Device& device) noexcept = 0;
};

/// What holds a device's memory, in bytes.
struct MemoryReport {
  size_t limit_bytes = 0;
  size_t allocated_bytes = 0;
  size_t reserved_bytes = 0;
  size_t movable_bytes = 0; ///< Resident storages that could go out.
  size_t in_use_bytes = 0; ///< Of running ops, and what they were given.
  size_t fixed_bytes = 0; ///< Pinned by the program, a captured graph or a collective.
  size_t leaving_bytes = 0; ///< On their way out.
  size_t unseen_bytes =
      0; ///< Of storages that no op has been seen to use: see Note [Learn, sleep, arm].
  size_t held_bytes = 0; ///< Lent to whoever needs room: see Note [Placeholders].
  size_t other_bytes = 0; ///< Small storages, private pools, what compiled code allocates inside.
};

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
/// Without backwards (inference) what is held beyond the limit comes in once in each pass, if the
/// rest stays: of weights that are used in turn, those that have just been used go. They are also
/// the last to be needed of all that is out, and would fill whatever room an op leaves, to go again
/// with the next one: so nothing comes back that is nearer to its last use than to its next.

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

/// Note [Learn, sleep, arm]
/// An op that is watched takes longer than one that is not, so ops are watched while that may
/// be of use. From `enable` on the policy *learns*: it sees one cycle of the program. If the memory
/// then stayed below three quarters of the limit, nothing is out and one thread has run all ops
/// (with the autograd engine's, which run while it waits), the policy *sleeps*: no op tells
/// anything, and allocations spend a budget (Note [The budget of allocations]). When the watermark
/// is crossed it is *armed*.
///
/// Ops that are running when it is armed have not told what they use. So nothing goes out until
/// the thread that armed it has come back from whatever it was calling (`note_boundary`), and
/// then only what has been used since: the limit gives way meanwhile. When Python's main thread
/// is between two of its instructions, no op of the one thread runs (`note_quiet`): what has been
/// made while nobody watched is looked for then (swap/discovery.py), and everything may go. A new
/// thread wakes it.

/// Automatic mode: keeps the memory of tensors on devices within their limits.
///
/// Thread-safe: every method may be called from any thread, with and without the GIL. Those of
/// `Room` wait as that says; `after_op` and the others wait for nothing, but may allocate for
/// prefetches.
class Policy final : public Room, public PagerListener {
 public:
  enum class Attention : uint8_t { kOff, kLearning, kArmed, kAsleep };

  explicit Policy(Pager& pager, PolicyOptions options = {});

  /// Set up before anything else is called.
  void set_feed(OpFeed* feed) noexcept {
    feed_ = feed;
  }
  void set_listener(PolicyListener* listener) noexcept {
    listener_ = listener;
  }

  /// Begins to keep `device` within `limit_bytes`, or changes the limit. Storages of at least
  /// `min_bytes` move; those known already go out at once until the rest fits.
  void enable(Device& device, size_t limit_bytes, size_t min_bytes);
  /// Ends it for all devices. What is out comes in with the ops that use it, until `track_none`.
  void disable();
  /// Storages do not become entities any more, and none is out that ops would have to look for.
  void track_none();

  /// For chaos mode: every storage from `min_bytes` on is an entity, without a limit.
  void track_all(size_t min_bytes);

  /// Whether storages of that size become entities as ops use them.
  bool tracks(size_t nbytes) const noexcept {
    return nbytes >= tracked_from_bytes();
  }
  size_t tracked_from_bytes() const noexcept {
    return tracked_from_bytes_.load(std::memory_order_relaxed);
  }
  bool enabled() const noexcept {
    return attention() != Attention::kOff;
  }
  Attention attention() const noexcept {
    return attention_.load(std::memory_order_acquire);
  }

  // --- Room ---
  Answer make_room(Device& device, size_t nbytes) override;
  void make_contiguous(Device& device, size_t nbytes) override;
  Answer after_out_of_memory(Device& device, size_t nbytes) override;
  void allocation_begins(Device& device) override;
  void allocation_ends(Device& device) noexcept override;
  void vacate_finished(Device& device) override;
  void before_capture() override;
  std::string explain(Device& device, size_t nbytes) override;

  // --- what ops tell ---

  /// The time of uses: one tick for each outermost op.
  CycleTracker& cycles() noexcept {
    return cycles_;
  }
  /// An outermost op of the calling thread has ended that used entities of `used`; null if it used
  /// none. Also such ops make cycles: a program of small tensors has no others.
  /// `on_main_thread`: see Note [Learn, sleep, arm]; `of_program`: see Note [The program's thread].
  void after_op(Device* used, bool on_main_thread, bool of_program, bool backward);
  /// The thread that armed the policy is inside no op that began before.
  void note_boundary() noexcept;
  /// Python's main thread is between two instructions, and all storages have been made known.
  void note_quiet() noexcept;
  /// The autograd engine goes on to a node on the calling thread: what ran there has ended.
  void note_node_begins() noexcept;
  /// While a plan is carried out: nothing goes or comes ahead of need but by the plan.
  void set_planned(bool planned) noexcept {
    if (planned_.load(std::memory_order_relaxed) != planned) { // else many threads write to it
      planned_.store(planned, std::memory_order_relaxed);
    }
  }
  Placeholders& placeholders() noexcept {
    return placeholders_;
  }
  /// Holds the placeholders that are missing, as far as there is room: moves storages aside for
  /// them, and pages nothing out.
  void hold_placeholders(Device& device);
  /// The most that was in use at a large allocation on a device since the last call; 0 without one.
  size_t take_recent_peak(const Device& device) noexcept {
    return watch_of(device).take_recent_peak();
  }
  /// The same in all, but for the small allocations since the last look at memory.
  size_t take_cycle_peak(const Device& device) noexcept {
    return watch_of(device).take_cycle_peak();
  }
  bool wants_boundary() const noexcept {
    return boundary_wanted_.load(std::memory_order_acquire);
  }
  /// A thread has been started: it may run ops.
  void wake();

  // --- PagerListener ---
  void became_resident(const EntityPtr& entity) override;
  void was_paged_out(const EntityPtr& entity) override;
  void was_cancelled(const EntityPtr& entity) override;

  MemoryReport report(Device& device);

  /// Whether the calling thread may let page-outs be committed now: see Note [Foreign calls] and
  /// Note [Learn, sleep, arm]. Takes microseconds.
  bool may_vacate() const;

 private:
  using Clock = std::chrono::steady_clock;
  enum class Progress { kMoved, kNothingUnderWay, kFailed };

  DeviceWatch& watch_of(const Device& device) {
    return watches_[Devices::index_of(device.device())];
  }
  Answer wait_for_room(Device& device, size_t nbytes);
  bool fill_budget(Device& device, size_t nbytes);
  Answer give_way(Device& device, size_t nbytes);
  void note_allocation(Device& device, size_t nbytes, size_t used_bytes);
  size_t request_pageouts(Device& device, size_t nbytes);
  size_t page_out(Device& device, const std::vector<EntityPtr>& entities);
  CrowdedWindow crowded_window(Device& device, size_t nbytes);
  bool move_aside(CrowdedWindow& window);
  bool hold_placeholder(Device& device, size_t nbytes);
  Progress wait_for_pageouts(uint64_t* progress, Clock::time_point deadline);
  bool others_may_let_go(Clock::time_point since);
  void page_out_ahead(Device& device, bool backward);
  void page_out_cooled(Device& device, size_t missing_bytes);
  void prefetch_ahead(Device& device, bool backward);
  bool keep_error();
  void forget_error();
  std::string last_error();

  // Note [Learn, sleep, arm]
  void end_cycle();
  bool may_sleep();
  void sleep();
  void arm();
  void learn();

  Pager& pager_;
  OpFeed* feed_ = nullptr;
  PolicyListener* listener_ = nullptr;
  const PolicyOptions options_;
  std::atomic<Attention> attention_{Attention::kOff};
  std::atomic<size_t> tracked_from_bytes_{SIZE_MAX};
  CycleTracker cycles_;
  std::array<DeviceWatch, Devices::kMost> watches_;
  Placeholders placeholders_;

  std::mutex attention_mutex_; // of who changes it; taken before everything else
  std::atomic<bool> boundary_wanted_{false};
  std::atomic<uint64_t> boundary_thread_{0};
  std::atomic<uint64_t> eligible_from_{0}; // uses before it do not make an entity eligible
  std::atomic<bool> other_threads_{false}; // in this cycle
  std::atomic<bool> planned_{false};
  std::atomic<bool> gave_way_{false}; // and what is beyond the limit is still there
  std::atomic<uint64_t> cycle_began_{0}; // where there is no backward

  std::mutex error_mutex_;
  std::string last_error_;
};

} // namespace torch_lms
