#include <entity/CudaEntityTransferQueue.h>

#include <algorithm>
#include <chrono>
#include <iterator>
#include <utility>

#include <entity/Error.h>

namespace torch_lms {
namespace {

constexpr auto kMomentForOps = std::chrono::microseconds(50);

} // namespace

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

void CudaEntityTransferQueue::check_open() const {
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

void CudaEntityTransferQueue::add(std::shared_ptr<EntityStorageImpl> entity, bool at_head) {
  const size_t nbytes = entity->nbytes();
  std::lock_guard<std::mutex> lock(mutex_);
  check_open();
  pending_bytes_.fetch_add(nbytes, std::memory_order_acq_rel);
  if (at_head) {
    queued_.push_front(std::move(entity));
  } else {
    queued_.push_back(std::move(entity));
  }
  note_added();
}

void CudaEntityTransferQueue::enqueue_all(
    std::vector<std::shared_ptr<EntityStorageImpl>> entities) {
  size_t nbytes = 0;
  for (const auto& entity : entities) {
    nbytes += entity->nbytes();
  }
  std::lock_guard<std::mutex> lock(mutex_);
  check_open();
  queued_.insert(
      queued_.end(),
      std::make_move_iterator(entities.begin()),
      std::make_move_iterator(entities.end()));
  pending_bytes_.fetch_add(nbytes, std::memory_order_acq_rel);
  note_added();
}

void CudaEntityTransferQueue::enqueue(std::shared_ptr<EntityStorageImpl> entity) {
  add(std::move(entity), false);
}

void CudaEntityTransferQueue::enqueue_passive(std::shared_ptr<EntityStorageImpl> entity) {
  add(std::move(entity), true);
}

bool CudaEntityTransferQueue::erase(const EntityStorageImpl* entity) {
  std::shared_ptr<EntityStorageImpl> erased;
  std::lock_guard<std::mutex> lock(mutex_);
  const auto at = std::find_if(
      queued_.begin(), queued_.end(), [entity](const std::shared_ptr<EntityStorageImpl>& e) {
        return e.get() == entity;
      });
  if (at == queued_.end()) {
    return false;
  }
  erased = std::move(*at);
  queued_.erase(at);
  pending_bytes_.fetch_sub(erased->nbytes(), std::memory_order_acq_rel);
  progressed_.notify_all();
  return true;
}

std::shared_ptr<EntityStorageImpl> CudaEntityTransferQueue::dequeue() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (queued_.empty()) {
    return nullptr;
  }
  auto head = std::move(queued_.front());
  queued_.pop_front();
  pending_bytes_.fetch_sub(head->nbytes(), std::memory_order_acq_rel);
  progressed_.notify_all();
  return head;
}

void CudaEntityTransferQueue::open() {
  std::lock_guard<std::mutex> lock(mutex_);
  locked_ = false;
}

void CudaEntityTransferQueue::start_actions() {
  std::unique_lock<std::mutex> lock(mutex_);
  progressed_.wait(lock, [this] { return !stopping_; });
  locked_ = false;
  if (!running_) {
    worker_ = std::thread([this] { work(); }); // may throw
    running_ = true;
    busy_ = true; // until it has begun: what its start throws is for who waits
  }
}

void CudaEntityTransferQueue::check_runs() const {
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
  return progress() + queued_.size() + taken_;
}

bool CudaEntityTransferQueue::is_over(uint64_t until) {
  std::lock_guard<std::mutex> lock(mutex_);
  return progress() >= until || idle();
}

void CudaEntityTransferQueue::wait_pending() {
  const uint64_t last = pending_until();
  std::unique_lock<std::mutex> lock(mutex_);
  progressed_.wait(lock, [&] { return progress() >= last || idle(); });
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

// --- the worker -----------------------------------------------------------------

void CudaEntityTransferQueue::work() {
  try {
    if (on_worker_start_) {
      on_worker_start_();
    }
  } catch (...) {
    store_error(std::current_exception());
  }
  for (;;) {
    std::shared_ptr<EntityStorageImpl> next;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      if (in_flight_.empty()) {
        busy_ = false;
        progressed_.notify_all();
        work_.wait(lock, [this] { return stopping_ || !queued_.empty(); });
      }
      const bool room = in_flight_.empty() || in_flight_bytes_ < max_in_flight_bytes_;
      if (!queued_.empty() && room) {
        next = std::move(queued_.front());
        queued_.pop_front();
        busy_ = true;
        ++taken_;
      } else if (in_flight_.empty() && stopping_) {
        return;
      }
    }
    if (next == nullptr) {
      if (!in_flight_.empty()) {
        finish_oldest();
      }
    } else if (direction_ == TransferDirection::kOut && next->pageout_must_wait()) {
      put_off(std::move(next));
    } else {
      put_off_in_turn_ = 0;
      waits_for_ops_.store(false, std::memory_order_release);
      begin(std::move(next));
    }
  }
}

/// Others first; if all have to wait, what is under way; then ops get a moment to end.
void CudaEntityTransferQueue::put_off(std::shared_ptr<EntityStorageImpl> entity) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (gives_up_on_ops_) {
    lock.unlock();
    waits_for_ops_.store(false, std::memory_order_release);
    FinishedTransfer not_begun;
    not_begun.entity = std::move(entity);
    finish(std::move(not_begun));
    return;
  }
  queued_.push_back(std::move(entity));
  --taken_;
  if (++put_off_in_turn_ < queued_.size()) {
    return;
  }
  put_off_in_turn_ = 0;
  if (!in_flight_.empty()) {
    lock.unlock();
    finish_oldest();
    return;
  }
  waits_for_ops_.store(true, std::memory_order_release);
  work_.wait_for(lock, kMomentForOps);
}

void CudaEntityTransferQueue::begin(std::shared_ptr<EntityStorageImpl> entity) {
  FinishedTransfer transfer;
  transfer.entity = std::move(entity);
  bool begun = false;
  try {
    if (direction_ == TransferDirection::kOut) {
      begun = transfer.entity->begin_pageout(&transfer.out);
    } else {
      transfer.in = transfer.entity->begin_pagein();
      begun = transfer.in != nullptr;
    }
  } catch (...) {
    store_error(std::current_exception());
  }
  if (!begun) {
    finish(std::move(transfer));
    return;
  }
  const size_t nbytes = transfer.entity->nbytes();
  in_flight_bytes_ += nbytes;
  in_flight_.push_back(InFlight{std::move(transfer), nbytes});
}

void CudaEntityTransferQueue::finish_oldest() {
  InFlight oldest = std::move(in_flight_.front());
  in_flight_.pop_front();
  in_flight_bytes_ -= oldest.nbytes;
  const bool out = direction_ == TransferDirection::kOut;
  const FencePtr fence = out ? oldest.transfer.out->fence : oldest.transfer.in->fence;
  try {
    if (fence != nullptr) {
      fence->wait();
    }
  } catch (...) {
    store_error(std::current_exception());
    if (out) {
      oldest.transfer.entity->abandon_pageout(oldest.transfer.out);
    } else {
      oldest.transfer.entity->abandon_pagein(oldest.transfer.in);
    }
  }
  finish(std::move(oldest.transfer));
}

void CudaEntityTransferQueue::finish(FinishedTransfer transfer) {
  if (on_finished_) {
    commit_here(std::move(transfer));
    return;
  }
  std::lock_guard<std::mutex> lock(mutex_);
  finished_.push_back(std::move(transfer));
  finished_count_.store(finished_.size(), std::memory_order_release);
  --taken_;
  progress_.fetch_add(1, std::memory_order_acq_rel);
  progressed_.notify_all();
}

void CudaEntityTransferQueue::commit_here(FinishedTransfer transfer) {
  const size_t nbytes = transfer.entity->nbytes();
  try {
    on_finished_(transfer);
  } catch (...) {
    store_error(std::current_exception());
  }
  transfer = FinishedTransfer();
  std::lock_guard<std::mutex> lock(mutex_);
  pending_bytes_.fetch_sub(nbytes, std::memory_order_acq_rel);
  --taken_;
  progress_.fetch_add(1, std::memory_order_acq_rel);
  progressed_.notify_all();
}

void CudaEntityTransferQueue::store_error(std::exception_ptr error) {
  std::lock_guard<std::mutex> lock(mutex_);
  error_ = std::move(error);
}

} // namespace torch_lms
