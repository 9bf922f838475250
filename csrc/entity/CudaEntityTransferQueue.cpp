#include <entity/CudaEntityTransferQueue.h>

#include <algorithm>
#include <chrono>
#include <iterator>
#include <new>
#include <utility>

#include <entity/Error.h>

namespace torch_lms {

CudaEntityTransferQueue::CudaEntityTransferQueue(
    TransferDirection direction,
    size_t max_in_flight_bytes,
    std::function<void()> on_worker_start,
    std::function<void(FinishedTransfer&)> on_finished)
    : direction_(direction),
      max_in_flight_bytes_(max_in_flight_bytes),
      on_worker_start_(std::move(on_worker_start)),
      on_finished_(std::move(on_finished)) {}

CudaEntityTransferQueue::~CudaEntityTransferQueue() {
  std::unique_lock<std::mutex> lock(mutex_);
  queued_.clear();
  stop(lock);
  for (const FinishedTransfer& transfer : finished_) { // nobody will commit them
    if (transfer.out != nullptr) {
      transfer.entity->abandon_pageout(transfer.out);
    } else if (transfer.in != nullptr) {
      transfer.entity->abandon_pagein(transfer.in);
    }
  }
}

// --- callers ------------------------------------------------------------------

void CudaEntityTransferQueue::check_not_forked() const {
  if (forked_) {
    throw Error(
        "expected the process that paging was first used in, found a child forked from it, which "
        "has no workers; start it with 'spawn' to page there");
  }
}

void CudaEntityTransferQueue::check_open() const {
  check_not_forked();
  if (locked_ || waiting_ != 0) {
    throw Error(
        "expected an open transfer queue, found one that is being waited for or has been "
        "stopped; start it (start_actions, or a new swap environment) before adding transfers");
  }
}

/// Under the lock. What is new need not wait for ops.
void CudaEntityTransferQueue::note_added() {
  put_off_in_turn_ = 0;
  waits_for_ops_.store(false, std::memory_order_release);
  work_.notify_one();
}

void CudaEntityTransferQueue::add(Entity entity, bool at_head) {
  const size_t nbytes = entity->nbytes();
  std::lock_guard<std::mutex> lock(mutex_);
  check_open();
  Queued& added =
      *queued_.insert(at_head ? queued_.begin() : queued_.end(), Queued{std::move(entity), 0});
  added.epoch = epochs_.add();
  pending_bytes_.fetch_add(nbytes, std::memory_order_acq_rel);
  note_added();
}

void CudaEntityTransferQueue::enqueue_all(
    std::vector<std::shared_ptr<EntityStorageImpl>> entities) {
  size_t nbytes = 0;
  std::vector<Queued> added;
  added.reserve(entities.size());
  for (Entity& entity : entities) {
    nbytes += entity->nbytes();
    added.push_back(Queued{std::move(entity), 0});
  }
  std::lock_guard<std::mutex> lock(mutex_);
  check_open();
  auto at = queued_.insert(
      queued_.end(), std::make_move_iterator(added.begin()), std::make_move_iterator(added.end()));
  for (; at != queued_.end(); ++at) {
    at->epoch = epochs_.add();
  }
  pending_bytes_.fetch_add(nbytes, std::memory_order_acq_rel);
  note_added();
}

void CudaEntityTransferQueue::enqueue(std::shared_ptr<EntityStorageImpl> entity) {
  add(std::move(entity), false);
}

void CudaEntityTransferQueue::enqueue_passive(std::shared_ptr<EntityStorageImpl> entity) {
  add(std::move(entity), true);
}

/// Under the lock.
CudaEntityTransferQueue::Entity CudaEntityTransferQueue::remove(std::deque<Queued>::iterator at) {
  const Queued removed = std::move(*at);
  queued_.erase(at);
  epochs_.finish(removed.epoch);
  pending_bytes_.fetch_sub(removed.entity->nbytes(), std::memory_order_acq_rel);
  progressed_.notify_all();
  return removed.entity;
}

bool CudaEntityTransferQueue::erase(const EntityStorageImpl* entity) {
  Entity erased; // destroyed after unlocking
  std::lock_guard<std::mutex> lock(mutex_);
  const auto at = std::find_if(queued_.begin(), queued_.end(), [entity](const Queued& queued) {
    return queued.entity.get() == entity;
  });
  if (at == queued_.end()) {
    return false;
  }
  erased = remove(at);
  return true;
}

std::shared_ptr<EntityStorageImpl> CudaEntityTransferQueue::dequeue() {
  std::lock_guard<std::mutex> lock(mutex_);
  return queued_.empty() ? nullptr : remove(queued_.begin());
}

void CudaEntityTransferQueue::open() {
  std::lock_guard<std::mutex> lock(mutex_);
  locked_ = false;
}

void CudaEntityTransferQueue::start_actions() {
  std::unique_lock<std::mutex> lock(mutex_);
  check_not_forked();
  progressed_.wait(lock, [this] { return !stopping_; });
  locked_ = false;
  if (!running_) {
    worker_ = std::thread([this] { work(); }); // may throw
    running_ = true;
    busy_ = true; // until it has begun: what its start throws is for who waits
  }
}

void CudaEntityTransferQueue::check_runs() const {
  check_not_forked();
  if (!running_ && !queued_.empty()) {
    throw Error(
        "expected a started transfer queue, found one with transfers and no worker; call "
        "start_actions (torch.cuda.prefetch_all for prefetches) before waiting");
  }
}

/// Under the lock, as all that follow.
bool CudaEntityTransferQueue::idle() const {
  return queued_.empty() && !busy_;
}

void CudaEntityTransferQueue::wait_idle(std::unique_lock<std::mutex>& lock) {
  check_runs();
  progressed_.wait(lock, [this] { return idle(); });
}

void CudaEntityTransferQueue::wait_actions() {
  std::unique_lock<std::mutex> lock(mutex_);
  ++waiting_; // Locks the queue until the last who waits is done.
  try {
    wait_idle(lock);
  } catch (...) {
    --waiting_;
    throw;
  }
  --waiting_;
  rethrow(lock);
}

uint64_t CudaEntityTransferQueue::pending_until() {
  std::lock_guard<std::mutex> lock(mutex_);
  check_runs();
  return epochs_.begin();
}

bool CudaEntityTransferQueue::is_over(uint64_t epoch) {
  std::lock_guard<std::mutex> lock(mutex_);
  return epochs_.over(epoch);
}

void CudaEntityTransferQueue::wait_pending() {
  const uint64_t epoch = pending_until();
  std::unique_lock<std::mutex> lock(mutex_);
  progressed_.wait(lock, [&] { return epochs_.over(epoch); });
  rethrow(lock);
}

void CudaEntityTransferQueue::wait_and_stop_actions() {
  std::unique_lock<std::mutex> lock(mutex_);
  locked_ = true;
  wait_idle(lock);
  locked_ = true; // Who has started it meanwhile has found its worker running.
  stop(lock);
  rethrow(lock);
}

void CudaEntityTransferQueue::give_up_on_ops() {
  std::lock_guard<std::mutex> lock(mutex_);
  gives_up_on_ops_ = true;
}

/// Once for each error, to the first who waits.
void CudaEntityTransferQueue::rethrow(std::unique_lock<std::mutex>&) {
  if (error_ != nullptr) {
    std::rethrow_exception(std::exchange(error_, nullptr));
  }
}

void CudaEntityTransferQueue::stop(std::unique_lock<std::mutex>& lock) {
  if (!running_) {
    return;
  }
  if (stopping_) {
    // Another thread stops it, and by the time this one wakes up it may have been started again.
    progressed_.wait(lock, [this] { return !stopping_; });
    return;
  }
  stopping_ = true;
  work_.notify_all();
  std::thread worker = std::move(worker_);
  lock.unlock();
  worker.join();
  lock.lock();
  running_ = false;
  stopping_ = false;
  progressed_.notify_all();
}

std::vector<FinishedTransfer> CudaEntityTransferQueue::take_finished() {
  std::lock_guard<std::mutex> lock(mutex_);
  finished_count_.store(0, std::memory_order_release);
  committing_.fetch_add(finished_.size(), std::memory_order_acq_rel);
  return std::exchange(finished_, {});
}

void CudaEntityTransferQueue::return_finished(std::vector<FinishedTransfer> transfers) {
  std::lock_guard<std::mutex> lock(mutex_);
  committing_.fetch_sub(transfers.size(), std::memory_order_acq_rel);
  if (finished_.empty()) {
    finished_.swap(transfers); // takes no memory
  } else {
    finished_.insert(
        finished_.begin(),
        std::make_move_iterator(transfers.begin()),
        std::make_move_iterator(transfers.end()));
  }
  finished_count_.store(finished_.size(), std::memory_order_release);
}

/// Both in one: what is taken and returned meanwhile is in one of the two all the time.
bool CudaEntityTransferQueue::has_uncommitted() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return !finished_.empty() || is_committing();
}

uint64_t CudaEntityTransferQueue::wait_for_progress(uint64_t seen, int64_t timeout_us) {
  std::unique_lock<std::mutex> lock(mutex_);
  progressed_.wait_for(
      lock, std::chrono::microseconds(timeout_us), [&] { return progress() > seen || idle(); });
  return progress();
}

void CudaEntityTransferQueue::retire(size_t nbytes) noexcept {
  pending_bytes_.fetch_sub(nbytes, std::memory_order_acq_rel);
  committing_.fetch_sub(1, std::memory_order_acq_rel);
}

size_t CudaEntityTransferQueue::size() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return queued_.size();
}

std::exception_ptr CudaEntityTransferQueue::take_error() {
  std::lock_guard<std::mutex> lock(mutex_);
  return std::exchange(error_, nullptr);
}

// --- forks ------------------------------------------------------------------------

void CudaEntityTransferQueue::prepare_fork() {
  step_mutex_.lock();
  mutex_.lock();
}

void CudaEntityTransferQueue::after_fork_in_parent() noexcept {
  mutex_.unlock();
  step_mutex_.unlock();
}

void CudaEntityTransferQueue::after_fork_in_child() noexcept {
  forked_ = running_; // a stopped queue needs nothing of the parent's
  // The old ones wait for threads of the parent that were about to wake up. They own nothing.
  new (&work_) std::condition_variable();
  new (&progressed_) std::condition_variable();
  mutex_.unlock();
  step_mutex_.unlock();
}

} // namespace torch_lms
