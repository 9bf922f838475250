#pragma once

#include <algorithm>
#include <atomic>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include <c10/core/Storage.h>
#include <entity/CudaEntityTransferQueue.h>

#include <extension/base/Stats.h>
#include <extension/memory/Devices.h>
#include <extension/transfer/ActionTimes.h>
#include <extension/transfer/Arrivals.h>
#include <extension/transfer/EntityTable.h>
#include <extension/transfer/TorchStorageBinding.h>

namespace torch_lms {

/// Who wants to know where entities are. Called from the threads that move them, with no lock
/// held; must not block.
class PagerListener {
 public:
  virtual ~PagerListener() = default;
  virtual void became_resident(const EntityPtr& entity) = 0;
  virtual void was_paged_out(const EntityPtr& entity) = 0;
  virtual void was_cancelled(const EntityPtr& entity) = 0;
};

/// Where an op finds the bytes of an entity that it has pinned.
enum class Place : uint8_t {
  kDevice,
  kHost, ///< In the host copy, until `EntityStorageImpl::end_service`.
  kNowhere, ///< What was dropped could not be made again: who touches the bytes gets the error.
};

/// Pages storages out and in: the entities of this process, the two transfer queues, and the
/// commits. There is one request path (`PageoutBatch`), one page-in path (`use`; prefetches only
/// begin what it ends) and one place of commits (`commit_finished`).
///
/// Commits happen on threads that run ops: at the boundaries of ops, when memory
/// is asked for and in the waits. So a storage moves only inside a call into
/// PyTorch or torch-lms, never between two statements of a program, and never inside another
/// extension's function (Note [Foreign calls]).
///
/// Thread-safe: every method may be called from any thread, with and without the GIL. Those that
/// wait say so; they wait for the workers, which take no lock of Python's. Locks: README.md.
class Pager final : public StorageEvents {
 public:
  explicit Pager(Devices& devices);

  /// Set up before anything moves.
  void set_listener(PagerListener* listener) noexcept {
    listener_ = listener;
  }
  void set_raw_access(std::function<void(c10::StorageImpl&)> call) {
    on_raw_access_ = std::move(call);
  }
  /// Brings what a dropped entity is made from: see Note [Recipes].
  void set_bring_ingredients(std::function<void(const EntityPtr&)> call) {
    bring_ingredients_ = std::move(call);
  }

  // --- entities ---

  /// The entity of a storage, null if it has none.
  EntityPtr find(const c10::StorageImpl& storage) {
    return table_.find(storage);
  }
  /// The same, or a new one; null if the storage cannot move. `by_hand`: smaller storages than
  /// automatic mode looks for may be entities from now on.
  EntityPtr find_or_track(c10::StorageImpl& storage, bool by_hand);
  /// The same by hand, and it is pinned until `unfix`.
  EntityPtr fix(c10::StorageImpl& storage);
  /// Returns false if it has not been.
  bool unfix(const c10::StorageImpl& storage) {
    return table_.unfix(storage);
  }
  /// All ops that begin from now on pin what they use of the storages that automatic mode tracks:
  /// only those that run now may use them unseen. See Note [Who may still use a storage].
  void note_all_ops_observed() noexcept {
    observed_since_.store(OpClock::get().tick(), std::memory_order_release);
  }
  /// Whether there are entities that were made by hand.
  bool tracks_by_hand() const noexcept {
    return tracks_by_hand_.load(std::memory_order_acquire);
  }

  /// Ops look for entities of every size from now on.
  void look_for_all() noexcept {
    tracks_by_hand_.store(true, std::memory_order_release);
  }

  /// Whether the host keeps copies of what comes in; those that there are go with `false`.
  void keep_copies(bool keep);
  /// Gives back the copies of storages that have died.
  void release_copies_of_dead();
  std::atomic<int64_t>& arriving_bytes() noexcept override {
    return arriving_bytes_;
  }
  bool keeps_copies() const noexcept override {
    return keeps_copies_.load(std::memory_order_relaxed);
  }

  // --- requests ---

  /// Moves a resident entity's bytes to another block of its device, in order with what the calling
  /// thread submits. False if that cannot be now, or no block was free whose address `suits`.
  bool relocate(const EntityPtr& entity, const std::function<bool(const void*)>& suits);

  /// Begins a page-out, or drops an unwritten storage's block at once. Returns false if the
  /// entity is in use or not resident. For several see `PageoutBatch`.
  bool evict(const EntityPtr& entity);

  /// Only the latter: RESIDENT -> PAGED_OUT without a copy. Not inside a foreign call.
  bool drop_unwritten(const EntityPtr& entity);

  /// RESIDENT -> DROPPED. Returns false if it stays. Not inside a foreign call.
  bool drop(const EntityPtr& entity, const std::shared_ptr<Recipe>& recipe);

  /// A page-out has been requested that the queue did not take.
  void take_back(const EntityPtr& entity);

  /// Enqueues a page-in. Returns false where there is nothing to do.
  bool prefetch(const c10::Storage& storage);

  /// Starts a prefetch that the policy has chosen: on the calling thread where
  /// copies are asynchronous (its place among the ops decides what it waits for), in
  /// the queue otherwise. Returns false if it could not be started.
  bool prefetch_ahead(const EntityPtr& entity, size_t contiguous_reserve_bytes);

  /// Calls off the latest prefetch that nobody has used yet; its memory is free at once
  /// and nothing has to be copied out. Returns false if there is none.
  bool cancel_last_prefetch();

  /// Calls off prefetches that have not begun; returns their bytes.
  size_t cancel_prefetches();

  // --- use ---

  /// The calling thread uses an entity, which it has pinned: brings the bytes in. Waits for
  /// their copy's submission, and may wait for room as `Room::make_room` does. `kHost` if there
  /// is no room, `kNowhere` if that befalls what was dropped; never throws for the want of it.
  Place use(const EntityPtr& entity);

  /// An op works on a host copy: counts it, and warns once.
  void note_served(const EntityPtr& entity, const std::string& why = {});

  /// The calling thread has pinned an entity: it stays, if it was on its way out.
  void call_off_pageout(const EntityPtr& entity);

  void raw_access(c10::StorageImpl& storage) override {
    on_raw_access_(storage);
  }
  void released(const std::shared_ptr<EntityStorageImpl>& entity) noexcept override;

  // --- commits and waits ---

  /// Commits what the workers have finished; waits for nothing. `allocating`: the device whose
  /// allocator's lock the caller holds, if any. No storage may be destroyed then, and nothing of
  /// another device is freed, whose lock another thread may hold while it wants this one.
  void commit_finished(const Device* allocating = nullptr);

  bool has_finished() const noexcept {
    return out_.has_finished() || in_.has_finished();
  }

  /// Waits until all page-outs are committed that there are now, at most a minute for ops of
  /// other threads that use what has been copied. Rethrows what failed.
  void wait_pageouts();
  /// Waits until all page-ins are committed. Rethrows what failed, but for
  /// prefetches that found no room: those are counted and stay paged out.
  void wait_pageins();

  /// Pages everything in; waits. Throws if the device has no room.
  void pagein_all();
  /// Makes all that has been dropped again: a process that is forked now cannot. What has no room
  /// stays.
  void make_dropped_again();

  // --- what there is ---

  /// Whether anything is paged out or on its way: ops have to be observed.
  bool active() const noexcept {
    return paged_out_storages() != 0 || out_.pending_bytes() != 0 || in_.pending_bytes() != 0 ||
           arrivals_.any();
  }
  CudaEntityTransferQueue& out_queue() {
    return out_;
  }
  CudaEntityTransferQueue& in_queue() {
    return in_;
  }
  Arrivals& arrivals() {
    return arrivals_;
  }
  EntityTable& table() {
    return table_;
  }
  Devices& devices() {
    return devices_;
  }
  /// What moving takes of the threads that ask for it.
  ActionTimes& action_times() noexcept {
    return action_times_;
  }

  Stats& stats() {
    return stats_;
  }
  int64_t paged_out_bytes() const noexcept {
    return paged_out_bytes_.load(std::memory_order_relaxed);
  }
  /// The same without what has device memory already, into which it is copied.
  size_t off_device_bytes() const noexcept {
    const int64_t arriving_bytes = arriving_bytes_.load(std::memory_order_relaxed);
    return static_cast<size_t>(std::max<int64_t>(0, paged_out_bytes() - arriving_bytes));
  }
  int64_t paged_out_storages() const noexcept {
    return paged_out_storages_.load(std::memory_order_relaxed);
  }

 private:
  EntityPtr make_entity(c10::StorageImpl& storage, bool by_hand);
  void note_made(const EntityPtr& entity);
  bool enqueue_prefetch(const EntityPtr& entity);
  void commit_pageouts(std::vector<KeepAlive>& dropped, const Device* allocating);
  CommitResult commit_pageout(FinishedTransfer& finished);
  void commit_pageins();
  void settle_prefetches();
  AccessResult access(const EntityPtr& entity);
  void count(const EntityPtr& entity, AccessResult result);
  void note_arrival(const EntityPtr& entity);
  void left_device(const EntityPtr& entity);
  void left_host(const EntityStorageImpl& entity) noexcept;
  bool reclaim_copy(HostPool::Urgency urgency);
  void reclaim_from(HostPool& pool);

  Devices& devices_;
  PagerListener* listener_ = nullptr;
  std::function<void(c10::StorageImpl&)> on_raw_access_;
  std::function<void(const EntityPtr&)> bring_ingredients_;
  EntityTable table_;
  CudaEntityTransferQueue out_;
  CudaEntityTransferQueue in_;
  Stats stats_;
  ActionTimes action_times_;
  Arrivals arrivals_;
  std::atomic<int64_t> paged_out_bytes_{0};
  std::atomic<int64_t> arriving_bytes_{0};
  std::atomic<int64_t> paged_out_storages_{0};
  std::atomic<uint64_t> observed_since_{0};
  std::atomic<bool> tracks_by_hand_{false};
  std::atomic<bool> keeps_copies_{false};

  std::mutex dropped_mutex_;
  std::vector<KeepAlive> dropped_; // to be destroyed outside of an allocator

  std::mutex kept_mutex_;
  std::deque<std::weak_ptr<Entity>> kept_; // whose copies the host keeps, the oldest first
  size_t sweep_kept_at_ = 256;
  std::vector<const HostPool*> pools_; // that ask for them
};

} // namespace torch_lms
