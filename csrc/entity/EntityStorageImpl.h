#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <entity/OpClock.h>
#include <entity/Recipe.h>
#include <entity/StorageBinding.h>
#include <entity/TransferBackend.h>

namespace torch_lms {

enum class EntityState : uint8_t {
  kResident,
  kOutQueued,
  kPagingOut,
  kPagedOut,
  kInQueued,
  kPagingIn,
  kDropped,
};

const char* to_string(EntityState state) noexcept;

/// What an access to an entity had to do.
enum class AccessResult : uint8_t {
  kResident, ///< Nothing: the bytes are on the device.
  kCancelledPageout, ///< A page-out was under way and has been called off.
  kPrefetched, ///< A prefetch had brought (or was bringing) the bytes.
  kPagedIn, ///< The calling thread paged the bytes in.
  kRemade, ///< The calling thread made the bytes again.
  kServed, ///< Ops use the host copy in place, and so must this one: see `serve`.
};

enum class CommitResult : uint8_t {
  kCommitted,
  kInUse, ///< An op that is running uses the entity; try again later.
  kDropped, ///< Cancelled meanwhile, or the storage is gone.
};

/// One copy to the host. Shared by the entity and the queue that runs it. Its
/// last owner must be a thread that may run a storage's destructor.
struct PageoutTransfer {
  KeepAlive keep;
  const void* device = nullptr;
  FencePtr after;
  // See Note [Who may still use a storage]: whether some of these ops were running when the
  // page-out was requested. Then `after` is made when they are over.
  EarlierOps earlier;
  bool doubtful = false;
  uint64_t accesses = 0; // to the entity, before the request
  uint64_t pins = 0; // that there had been by then
  void* host = nullptr;
  FencePtr fence;
  std::atomic<bool> cancelled{false};
  bool copying = false; // guarded by the entity's mutex: copy is being submitted
};

/// One copy to the device, or one making of what was dropped. Waits for the copy if its block has
/// not been installed.
struct PageinTransfer {
  PageinTransfer() = default;
  ~PageinTransfer();
  PageinTransfer(const PageinTransfer&) = delete;
  PageinTransfer& operator=(const PageinTransfer&) = delete;

  std::unique_ptr<DeviceBlock> block;
  FencePtr fence;
  std::shared_ptr<Recipe> recipe; // instead of a host copy
  bool submitted = false; // guarded by the entity's mutex
  bool failed = false; // guarded by the entity's mutex
};

/// The bytes behind one tensor storage, and where they are.
///
///     RESIDENT -> OUT_QUEUED -> PAGING_OUT -> PAGED_OUT
///        ^  ^________|_____________|             |  ^
///        |   access cancels                      v  |  no room: back
///        |___________ PAGING_IN <------------ IN_QUEUED
///        |                ^
///        |___ drop _> DROPPED
///
/// A page-out has three steps: `request_pageout` (any thread; fixes the point
/// in the device's work after which the copy runs), `begin_pageout` (a queue's
/// worker; host memory and copy) and `commit_pageout` (a thread that runs ops;
/// the storage lets go of its device block). Until the commit the device memory
/// is intact, so an access simply cancels. A page-in has the same three steps.
/// Everything that can fail happens before ownership changes: on failure the
/// entity stays where it was.
///
/// A dropped entity has its bytes nowhere, but a `Recipe`: its page-in makes them again. Its
/// storage points at memory that cannot be read.
///
/// Thread-safe: every method may be called from any thread. The mutex is held
/// neither during a copy nor while the device allocator is called; see
/// README.md beside this file for the lock order.
class EntityStorageImpl : public std::enable_shared_from_this<EntityStorageImpl> {
 public:
  /// `first_seen` is the tick of Note [Who may still use a storage]; 0 for a
  /// storage that no running op can know.
  EntityStorageImpl(
      std::unique_ptr<StorageBinding> binding,
      std::shared_ptr<TransferBackend> backend,
      size_t nbytes,
      uint64_t first_seen);
  virtual ~EntityStorageImpl();
  EntityStorageImpl(const EntityStorageImpl&) = delete;
  EntityStorageImpl& operator=(const EntityStorageImpl&) = delete;

  size_t nbytes() const noexcept {
    return nbytes_;
  }
  EntityState state() const noexcept {
    return state_.load(std::memory_order_acquire);
  }

  /// RESIDENT -> OUT_QUEUED. Returns false in every other state, for a pinned
  /// entity, and while another thread requests the same. The caller enqueues the
  /// entity. A copy that the host has kept is given back: try `drop_unwritten` first.
  /// `known_since`: ops that began at or before this tick may use the bytes without having pinned
  /// them, since nothing was on its way out then; 0 where every op pins its inputs. See Note [Who
  /// may still use a storage].
  bool request_pageout(uint64_t known_since = 0);

  /// The same in two halves, so that several requests can share one fence.
  /// `begin_request` returns null where `request_pageout` returns false; from then on
  /// nothing but this request can move the bytes. `finish_request` comes when the
  /// transfer has its fence; it returns false if the entity has been used meanwhile.
  /// Each begun request has to be finished or abandoned.
  std::shared_ptr<PageoutTransfer> begin_request();
  bool finish_request(const std::shared_ptr<PageoutTransfer>& transfer);
  void abandon_request() noexcept;

  /// Whether the copy of a requested page-out has to wait for ops of other threads, which
  /// may use the bytes without having pinned them. For a queue's worker.
  bool pageout_must_wait();

  /// PAGED_OUT -> IN_QUEUED. Returns false in every other state.
  bool request_pagein();

  /// IN_QUEUED -> PAGED_OUT: a prefetch that has not begun is called off.
  bool cancel_pagein();

  /// OUT_QUEUED -> PAGING_OUT: takes host memory and submits the copy. Returns
  /// false if the page-out was cancelled or nobody else holds the storage any
  /// more. Throws HostPoolFull, SpillFailed or TransferFailed; the entity is
  /// RESIDENT then. `transfer` is set wherever there is one, also on a throw.
  bool begin_pageout(std::shared_ptr<PageoutTransfer>* transfer);

  /// PAGING_OUT -> PAGED_OUT, for a transfer whose fence has passed. `garbage`
  /// receives what the caller destroys when it holds no lock.
  CommitResult commit_pageout(
      const std::shared_ptr<PageoutTransfer>& transfer,
      std::unique_ptr<DeviceBlock>* garbage);

  /// A transfer whose copy failed: PAGING_OUT -> RESIDENT.
  void abandon_pageout(const std::shared_ptr<PageoutTransfer>& transfer) noexcept;

  /// IN_QUEUED -> PAGING_IN: takes device memory and submits the copy. Returns
  /// null if the page-in was cancelled or the storage is gone. Throws what the
  /// device allocator throws; the entity is PAGED_OUT then.
  std::shared_ptr<PageinTransfer> begin_pagein();

  /// PAGING_IN -> RESIDENT. Returns false if another thread did it already.
  bool commit_pagein(const std::shared_ptr<PageinTransfer>& transfer);

  /// A transfer whose copy failed: PAGING_IN -> PAGED_OUT.
  void abandon_pagein(const std::shared_ptr<PageinTransfer>& transfer) noexcept;

  /// PAGING_IN -> PAGED_OUT: a prefetch that nobody has used is called off, and what it
  /// has copied is forgotten. Returns its device block, which the calling thread's
  /// stream may reuse; null if the entity was in another state.
  std::unique_ptr<DeviceBlock> cancel_arrival(const std::shared_ptr<PageinTransfer>& transfer);

  /// RESIDENT -> DROPPED: the bytes go, and `recipe` makes them again when they are used. The
  /// storage holds `unreadable` meanwhile. Returns false, and changes nothing, for an entity that
  /// is in another state, pinned, or on its way. `garbage` as for `commit_pageout`.
  bool drop(
      const std::shared_ptr<Recipe>& recipe,
      void* unreadable,
      std::unique_ptr<DeviceBlock>* garbage);

  /// RESIDENT -> RESIDENT: moves the bytes to another block of the device, one whose address
  /// `suits`. Returns false, and changes nothing, for an entity that may not leave its block either
  /// (as `drop`), or whose block is of another stream than the caller's. Throws what the device
  /// allocator throws.
  bool relocate(const std::function<bool(const void*)>& suits);

  /// A dropped entity could not be made again: who asks for its address gets an error that says
  /// so, until it has been. Changes nothing in other states. The caller holds the storage.
  void refuse(const std::string& why);

  /// From now on a raw mutable access calls `StorageBinding`'s hook, where the bytes lie on the
  /// device. The caller holds the storage.
  void watch_writes();

  /// An op (or raw access) of the calling thread uses the bytes: brings them to
  /// the device whatever the state and orders the thread's stream after them.
  /// Throws what the device allocator throws (the entity is PAGED_OUT then: see `serve`), or the
  /// recipe (it is DROPPED). The caller holds the storage and, unless it gets `kServed`, has pinned
  /// the entity for as long as it uses the bytes. `kServed` counts as a `serve` of its own.
  AccessResult access();

  /// What an access that found no device memory does instead: the host copy is used in
  /// place. Until as many `end_service` nothing brings the bytes in, so that every op works on
  /// one copy. Returns false if they are not paged out any more: access again.
  bool serve();
  void end_service() noexcept;

  /// As `access`, but leaves a paged-out entity where it is and returns false.
  /// Cancels a page-out under way.
  bool touch(AccessResult* result);

  /// Whether the bytes are on the device and no stream has to be ordered after their
  /// arrival any more: until the next request, accesses have nothing to do.
  bool settled();

  /// The copy that brought the bytes, if it may still be under way.
  FencePtr arrival();

  /// While pinned an entity is not committed to the host. Pins nest.
  void pin() noexcept {
    pins_.fetch_add(kOnePin, std::memory_order_seq_cst);
  }
  void unpin() noexcept {
    pins_.fetch_sub(1, std::memory_order_release);
  }
  bool pinned() const noexcept {
    return pins() != 0;
  }
  uint64_t pins() const noexcept {
    return pins_.load(std::memory_order_seq_cst) & UINT32_MAX;
  }

  /// `pin`, and whether that was all there is to an access. It is if the bytes lie on the
  /// device and neither a page-out nor the copy that brought them is under way. Takes no lock.
  bool pin_settled() noexcept {
    pin();
    return settled_.load(std::memory_order_seq_cst); // see Note [Pins and requests]
  }

  /// RESIDENT -> PAGED_OUT without a copy: the host still has one, and the bytes have not been
  /// written since. Returns false, and changes nothing, in every other case. `garbage` as for
  /// `commit_pageout`.
  bool drop_unwritten(std::unique_ptr<DeviceBlock>* garbage);

  /// Whether the host has a copy of resident bytes, which may be stale.
  bool keeps_copy() const noexcept {
    return kept_.load(std::memory_order_relaxed) != nullptr;
  }

  /// Whether it is the same as the bytes: where they may have been written since, it is given back.
  /// The caller holds the storage and has pinned the entity.
  bool keeps_equal_copy();

  /// Gives such a copy back: the bytes have been written, or host memory is short. Returns
  /// whether there was one.
  bool release_copy() noexcept;

  /// The same, and the storage's block becomes an ordinary one, for who looks at more than its
  /// bytes. The caller holds the storage and has pinned the entity.
  void stop_watching();

  /// The same, for who only wants the copy back: where an op uses the bytes, the block stays as it
  /// is. The op may be asking for its address at this moment, and the tensor library may then be
  /// changing what this would change. Who pins the entity meanwhile waits. The caller holds the
  /// storage. Nor does the block change where `watched_again` tells so: it is asked under the lock,
  /// so whoever calls `watch_writes` after it has changed finds its watch unharmed.
  void end_keeping(const std::function<bool()>& watched_again = nullptr);

  /// Where the device block is; null unless resident. Only for looking at addresses:
  /// the storage may let go of the block at any time.
  const void* device_address() const;

  /// The storage let go of the host copy (it died, or was given other memory).
  /// Called by the mark on the storage's pointer.
  void host_copy_released() noexcept;

  /// Keeps the storage alive; null if it is gone.
  KeepAlive hold() {
    return binding_->hold();
  }

  /// The same; null for want of a few bytes, too.
  KeepAlive try_to_hold() noexcept;

  /// Whether only a page-out, which may be over, still holds the storage.
  bool is_leaving();

  /// Whether the storage is gone, or holds other memory than the entity's.
  bool gone() const {
    return replaced() || binding_->expired();
  }
  /// The latter, as far as it has been noticed; enough for who holds the storage. Cheap.
  bool replaced() const noexcept {
    return gone_.load(std::memory_order_acquire);
  }

  /// The storage holds other memory now: the entity lets go of it, and is `gone`. Returns false,
  /// and changes nothing, while a move is being requested or called off, and unless resident. The
  /// caller holds the storage.
  bool retire();

  const TransferBackend* backend() const noexcept {
    return backend_.get();
  }

  /// Pages out on the calling thread, start to end: the queue's move for hosts
  /// that commit on the worker. Returns false if it was cancelled or not
  /// allowed. Throws as `begin_pageout`.
  bool pageout_internal_sync();

  /// Pages in on the calling thread, start to end. Returns false if there was
  /// nothing to do. Throws as `begin_pagein`.
  bool pagein_internal_sync();

 private:
  using Lock = std::unique_lock<std::mutex>;

  /// A host copy, given back when this goes: after unlocking.
  class ReleasedCopy {
   public:
    ReleasedCopy() = default;
    ReleasedCopy(TransferBackend& backend, void* copy, FencePtr after) noexcept
        : backend_(&backend), copy_(copy), after_(std::move(after)) {}
    ~ReleasedCopy() {
      if (copy_ != nullptr) {
        backend_->free_host(copy_, std::move(after_));
      }
    }
    ReleasedCopy(ReleasedCopy&& other) noexcept {
      *this = std::move(other);
    }
    ReleasedCopy& operator=(ReleasedCopy&& other) noexcept {
      std::swap(backend_, other.backend_);
      std::swap(copy_, other.copy_);
      std::swap(after_, other.after_);
      return *this;
    }
    explicit operator bool() const noexcept {
      return copy_ != nullptr;
    }

   private:
    TransferBackend* backend_ = nullptr;
    void* copy_ = nullptr;
    FencePtr after_;
  };

  /// What the device allocator has to be told when the lock is released (README.md, Locks).
  struct Afterwards {
    bool copy_reads_block = false;
    bool copy_writes_block = false;
    std::shared_ptr<Recipe> recipe; // lets go of what it needed
  };

  /// The cases of `access`, under the lock; may let go of it on the way.
  AccessResult access_locked(Lock& lock, Afterwards& afterwards);
  void tell_allocator(Lock& lock, const Afterwards& afterwards);
  const FencePtr& arrival_locked();
  ReleasedCopy take_copy_locked() noexcept;
  AccessResult cancel_pageout_locked(Lock& lock, Afterwards& afterwards);
  AccessResult finish_pagein_locked(Lock& lock, Afterwards& afterwards);
  std::shared_ptr<PageinTransfer> submit_pagein_locked(Lock& lock);
  bool commit_pagein_locked(const std::shared_ptr<PageinTransfer>& transfer);
  bool may_leave_locked(KeepAlive* keep);
  bool leave_locked(EntityState to, void* address, std::unique_ptr<DeviceBlock>* garbage);
  void order_after_arrival_locked();
  bool unreferenced_locked();
  bool replaced_since_request_locked(const PageoutTransfer& transfer);
  void set_state(EntityState state) noexcept {
    state_.store(state, std::memory_order_release);
    refresh_settled();
  }
  void refresh_settled() noexcept {
    settled_.store(
        state() == EntityState::kResident && !calling_off_ && arrival_ == nullptr,
        std::memory_order_seq_cst);
  }

  // Note [Pins and requests]
  // An op that finds `settled_` takes no lock, so a request for a page-out has to notice it
  // otherwise. The upper half of `pins_` counts every pin there has been, the lower half those
  // that there are. A request compares the upper half with what it was before the fence: who
  // pinned since has submitted work that the fence does not cover. It looks after it has cleared
  // `settled_`, the op looks at `settled_` after it has pinned, and all four are sequentially
  // consistent: at least one of the two sees the other.
  static constexpr uint64_t kOnePin = (uint64_t{1} << 32) + 1;
  uint64_t pins_ever() const noexcept {
    return pins_.load(std::memory_order_seq_cst) >> 32;
  }

  const std::unique_ptr<StorageBinding> binding_;
  const std::shared_ptr<TransferBackend> backend_;
  const size_t nbytes_;
  const uint64_t first_seen_;

  std::atomic<EntityState> state_{EntityState::kResident};
  std::atomic<uint64_t> pins_{0};
  std::atomic<bool> settled_{true};
  std::atomic<bool> gone_{false};
  std::atomic<bool> unreferenced_{false}; // and so gone: only a page-out held it
  std::atomic<void*> kept_{nullptr}; // the host's copy of resident bytes; written under the mutex

  mutable std::mutex mutex_;
  std::condition_variable submitted_;
  uint64_t accesses_ = 0;
  bool requesting_ = false;
  bool calling_off_ = false; // a page-out, whose copy may still read the block
  size_t served_ = 0; // ops that use the host copy in place
  bool was_served_ = false; // since the bytes have left the device
  std::shared_ptr<PageoutTransfer> out_;
  std::shared_ptr<PageinTransfer> in_;
  void* host_ = nullptr; // the storage's memory while paged out
  std::shared_ptr<Recipe> recipe_; // while dropped
  FencePtr arrival_; // streams that use the bytes start after it
};

/// The manual's name for it (MLMS, chapter 5): what differs between devices is the backend.
using CudaEntityStorageImpl = EntityStorageImpl;

} // namespace torch_lms
