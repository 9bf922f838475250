#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include <entity/EntityStorageImpl.h>
#include <entity/TransferEpochs.h>

namespace torch_lms {

enum class TransferDirection : uint8_t { kOut, kIn };

/// A transfer whose copy is over, waiting to be committed.
struct FinishedTransfer {
  std::shared_ptr<EntityStorageImpl> entity;
  std::shared_ptr<PageoutTransfer> out; // kOut
  std::shared_ptr<PageinTransfer> in; // kIn
};

/// A first-in-first-out queue of transfers in one direction, run by one worker
/// thread. (MLMS manual, section 5.3.) The worker submits copies while fewer
/// than `max_in_flight_bytes` are under way, waits for the oldest and hands it
/// to `take_finished`: commits, and whatever may run a storage's destructor, are
/// for threads that run ops. An exception on the worker is stored and rethrown to
/// the next caller that waits; the worker goes on.
///
/// Hosts whose commits any thread may make (the fork, whose storages are not touched by
/// one) give `on_finished`: the worker hands each transfer to it instead.
///
/// Thread-safe: every method may be called from any thread but the worker. No
/// entity, backend or allocator is called while the queue's mutex is held.
class CudaEntityTransferQueue {
 public:
  /// `on_worker_start` runs first on every worker; `on_finished` commits there what is over.
  explicit CudaEntityTransferQueue(
      TransferDirection direction,
      size_t max_in_flight_bytes = size_t{1} << 30,
      std::function<void()> on_worker_start = nullptr,
      std::function<void(FinishedTransfer&)> on_finished = nullptr);
  /// Waits for the transfers under way; those still queued are called off.
  ~CudaEntityTransferQueue();
  CudaEntityTransferQueue(const CudaEntityTransferQueue&) = delete;
  CudaEntityTransferQueue& operator=(const CudaEntityTransferQueue&) = delete;

  /// Adds a transfer to the tail. Throws Error while the queue is locked.
  void enqueue(std::shared_ptr<EntityStorageImpl> entity);

  /// Adds several, all or none.
  void enqueue_all(std::vector<std::shared_ptr<EntityStorageImpl>> entities);

  /// Adds a passive transfer, which somebody is waiting for, to the head.
  void enqueue_passive(std::shared_ptr<EntityStorageImpl> entity);

  /// Removes a queued transfer. Returns false if it is not queued.
  bool erase(const EntityStorageImpl* entity);

  /// Removes and returns the head of the queue; null if it is empty.
  std::shared_ptr<EntityStorageImpl> dequeue();

  /// Unlocks the queue without starting its worker.
  void open();

  /// Starts the worker, and unlocks the queue. No effect while it is running, though another thread
  /// may be about to stop it; where one is stopping it, waits until it has ended, and starts
  /// another.
  void start_actions();

  /// Locks the queue (nothing can be added), waits until all transfers are
  /// over, and unlocks it. Rethrows what failed on the worker. The queue must be
  /// started.
  void wait_actions();

  /// Waits until all transfers are over that are there now; others may be added
  /// meanwhile. Rethrows as `wait_actions`.
  void wait_pending();

  /// The same in turns: an epoch that all transfers are before that are there now, and whether
  /// they are over. `pending_until` throws Error where nobody works on them. What failed is for
  /// `take_error`.
  uint64_t pending_until();
  bool is_over(uint64_t epoch);

  /// As `wait_actions`, but stops the worker and leaves the queue locked.
  void wait_and_stop_actions();

  /// For the end of the program: from now on a page-out that has to wait for ops of other
  /// threads is over without having begun. The bytes stay, and an access calls it off.
  void give_up_on_ops();

  /// Takes what is ready to commit, in the order of the transfers. The caller retires or returns
  /// each.
  std::vector<FinishedTransfer> take_finished();

  /// Puts back what could not be committed yet.
  void return_finished(std::vector<FinishedTransfer> transfers);

  /// Whether some thread has taken what it has neither retired nor returned.
  bool is_committing() const noexcept {
    return committing_.load(std::memory_order_acquire) != 0;
  }
  /// The same, or something is ready to commit.
  bool has_uncommitted() const;

  /// Cheap: whether `take_finished` would return anything.
  bool has_finished() const noexcept {
    return finished_count_.load(std::memory_order_acquire) != 0;
  }

  /// Blocks until a transfer finishes after the `seen`-th, the queue is idle, or
  /// `timeout_us` has passed. Returns the count of transfers finished so far.
  uint64_t wait_for_progress(uint64_t seen, int64_t timeout_us);
  uint64_t progress() const noexcept {
    return progress_.load(std::memory_order_acquire);
  }

  /// Bytes that are queued, under way, or finished and not yet committed.
  size_t pending_bytes() const noexcept {
    return pending_bytes_.load(std::memory_order_acquire);
  }
  /// The caller has committed or dropped a finished transfer of so many bytes.
  void retire(size_t nbytes) noexcept;

  /// Transfers that are queued and have not begun.
  size_t size() const;

  /// Whether all that is queued now waits for ops of other threads to end (see
  /// `EntityStorageImpl::pageout_must_wait`).
  bool waits_for_ops() const noexcept {
    return waits_for_ops_.load(std::memory_order_acquire);
  }

  /// The exception that the worker stored last, taken out; null if none.
  std::exception_ptr take_error();

  /// Around a fork, for `pthread_atfork`, on the thread that forks: before it, after it in the
  /// parent, after it in the child. Once each: the first waits until the worker is between two
  /// steps (the submission of a copy, on the CPU the copy; a commit) and takes the queue's locks,
  /// the others give them back. The child has no worker: where there was one, whatever would need
  /// it throws Error in the child from now on, and the queue must not be destroyed there.
  void prepare_fork();
  void after_fork_in_parent() noexcept;
  void after_fork_in_child() noexcept;

  /// Throws Error in such a child.
  void check_not_forked() const;

 private:
  using Entity = std::shared_ptr<EntityStorageImpl>;

  struct Queued {
    Entity entity;
    uint64_t epoch;
  };
  struct InFlight {
    FinishedTransfer transfer;
    size_t nbytes;
    uint64_t epoch;
  };

  void add(Entity entity, bool at_head);
  void note_added();
  void check_open() const;
  Entity remove(std::deque<Queued>::iterator at);
  void work();
  void run(Queued next);
  void begin(Queued next);
  void put_off(Queued next);
  void finish_oldest();
  void finish(FinishedTransfer transfer, uint64_t epoch);
  void commit_here(FinishedTransfer transfer, uint64_t epoch);
  void note_finished(uint64_t epoch) noexcept;
  void store_error(std::exception_ptr error);
  void check_runs() const;
  bool idle() const;
  void wait_idle(std::unique_lock<std::mutex>& lock);
  void rethrow(std::unique_lock<std::mutex>& lock);
  void stop(std::unique_lock<std::mutex>& lock);

  const TransferDirection direction_;
  const size_t max_in_flight_bytes_;
  const std::function<void()> on_worker_start_;
  const std::function<void(FinishedTransfer&)> on_finished_;

  std::mutex step_mutex_; // held while the worker calls an entity; taken before `mutex_`
  mutable std::mutex mutex_;
  std::condition_variable work_; // the worker waits for it
  std::condition_variable progressed_; // callers wait for it
  std::deque<Queued> queued_;
  TransferEpochs epochs_; // of what is queued, and of what the worker has taken and not finished
  std::vector<FinishedTransfer> finished_;
  std::exception_ptr error_;
  bool locked_ = false; // stopped
  size_t waiting_ = 0; // threads in `wait_actions`
  bool running_ = false;
  bool stopping_ = false;
  bool busy_ = false; // the worker holds a transfer
  bool gives_up_on_ops_ = false;
  bool forked_ = false; // this process is a child without the worker
  std::thread worker_;

  // Used by the worker alone.
  std::deque<InFlight> in_flight_;
  size_t in_flight_bytes_ = 0;

  std::atomic<size_t> put_off_in_turn_{0}; // since a transfer has been added or begun
  std::atomic<size_t> finished_count_{0};
  std::atomic<size_t> committing_{0}; // taken, and neither retired nor returned
  std::atomic<size_t> pending_bytes_{0};
  std::atomic<uint64_t> progress_{0};
  std::atomic<bool> waits_for_ops_{false};
};

} // namespace torch_lms
