#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>

#include <ATen/core/TensorBase.h>
#include <c10/core/Storage.h>
#include <entity/OpClock.h>

#include <extension/memory/Devices.h>
#include <extension/transfer/Commits.h>
#include <extension/transfer/PagerState.h>
#include <extension/transfer/Requests.h>
#include <extension/transfer/TorchStorageBinding.h>

namespace torch_lms {

/// Where an op finds the bytes of an entity that it has pinned.
enum class Place : uint8_t {
  kDevice,
  kHost, ///< In the host copy, until `EntityStorageImpl::end_service`.
  kNowhere, ///< What was dropped could not be made again: who touches the bytes gets the error.
};

/// How a storage becomes an entity, which says who may use it without having pinned it. See Note
/// [Who may still use a storage].
enum class FoundBy : uint8_t {
  kOp, ///< Automatic mode looks for it: only ops that began before all were observed.
  kInnerOp, ///< The same inside of another op, which may have made it: ops that run now.
  kHand, ///< The program asks for it, whatever its size: ops that run now.
};

/// Pages storages out and in: the entities of this process, and their use. There is one request
/// path (`PageoutBatch`, by way of `Requests`), one page-in path (`use`; prefetches only begin what
/// it ends) and one place of commits (`Commits`).
///
/// Thread-safe: every method may be called from any thread, with and without the GIL. Those that
/// wait say so; they wait for the workers, which take no lock of Python's. Locks: README.md.
class Pager final : public StorageEvents {
 public:
  explicit Pager(Devices& devices);

  /// Set up before anything moves.
  void set_listener(PagerListener* listener) noexcept {
    state_.whereabouts.set_listener(listener);
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
    return state_.table.find(storage);
  }
  /// That of a tensor's storage; null if the tensor has none, or is none.
  EntityPtr find(const at::TensorBase& tensor) {
    return tensor.defined() && tensor.has_storage()
               ? find(*tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl())
               : nullptr;
  }
  /// The same, or a new one; null if the storage cannot move.
  EntityPtr find_or_track(c10::StorageImpl& storage, FoundBy by);
  /// The same by hand, and it is pinned until `unfix`.
  EntityPtr fix(c10::StorageImpl& storage);
  /// Returns false if it has not been.
  bool unfix(const c10::StorageImpl& storage) {
    return state_.table.unfix(storage);
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

  std::atomic<int64_t>& arriving_bytes() noexcept override {
    return state_.whereabouts.arriving_bytes();
  }
  bool keeps_copies() const noexcept override {
    return state_.kept.keeps();
  }

  // --- the parts ---

  Requests& requests() noexcept {
    return requests_;
  }
  KeptCopies& kept_copies() noexcept {
    return state_.kept;
  }
  /// See `Commits`, as to the next three.
  void commit_finished(const Device* allocating = nullptr) {
    commits_.commit_finished(allocating);
  }
  void wait_pageouts() {
    commits_.wait_pageouts();
  }
  void wait_pageins() {
    commits_.wait_pageins();
  }
  bool has_finished() const noexcept {
    return state_.out.has_finished() || state_.in.has_finished();
  }

  // --- use ---

  /// The calling thread uses an entity, which it has pinned: brings the bytes in. Waits for
  /// their copy's submission, and may wait for room as `Room::make_room` does. `kHost` if there
  /// is no room, `kNowhere` if that befalls what was dropped; never throws for the want of it.
  /// Throws what fails where the bytes are on the device: streams cannot be ordered after them.
  Place use(const EntityPtr& entity);

  /// As `use`, for a moment: pins it meanwhile, and ends a service of its host copy.
  void bring_in(const EntityPtr& entity);

  /// An op works on a host copy: counts it, and warns once.
  void note_served(const EntityPtr& entity, const std::string& why = {});

  void raw_access(c10::StorageImpl& storage) override {
    on_raw_access_(storage);
  }
  void released(const std::shared_ptr<EntityStorageImpl>& entity) noexcept override;

  /// Pages everything in; waits. Throws if the device has no room.
  void pagein_all();
  /// Makes all that has been dropped again: a process that is forked now cannot. What has no room
  /// stays, and who uses it there gets an error that says so.
  void make_dropped_again();

  // --- what there is ---

  /// Whether anything is paged out or on its way: ops have to be observed.
  bool active() const noexcept {
    return paged_out_storages() != 0 || state_.out.pending_bytes() != 0 ||
           state_.in.pending_bytes() != 0 || state_.arrivals.any();
  }
  CudaEntityTransferQueue& out_queue() {
    return state_.out;
  }
  CudaEntityTransferQueue& in_queue() {
    return state_.in;
  }
  Arrivals& arrivals() {
    return state_.arrivals;
  }
  EntityTable& table() {
    return state_.table;
  }
  Devices& devices() {
    return devices_;
  }
  /// What moving takes of the threads that ask for it.
  ActionTimes& action_times() noexcept {
    return state_.action_times;
  }

  Stats& stats() {
    return state_.stats;
  }
  int64_t paged_out_bytes() const noexcept {
    return state_.whereabouts.paged_out_bytes();
  }
  size_t off_device_bytes() const noexcept {
    return state_.whereabouts.off_device_bytes();
  }
  /// What the device would hold if nothing were off it: paging does not change that. Takes its
  /// allocator's lock.
  size_t held_bytes(const Device& device) const {
    return device.use().allocated_bytes + off_device_bytes();
  }
  int64_t paged_out_storages() const noexcept {
    return state_.whereabouts.paged_out_storages();
  }

 private:
  EntityPtr make_entity(c10::StorageImpl& storage, FoundBy by);
  void note_made(const EntityPtr& entity);
  AccessResult access(const EntityPtr& entity);

  Devices& devices_;
  std::function<void(c10::StorageImpl&)> on_raw_access_;
  std::function<void(const EntityPtr&)> bring_ingredients_;
  PagerState state_;
  Requests requests_{state_};
  Commits commits_{state_};
  std::atomic<uint64_t> observed_since_{0};
  std::atomic<bool> tracks_by_hand_{false};
};

} // namespace torch_lms
