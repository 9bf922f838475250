// The worker of CudaEntityTransferQueue.

#include <entity/CudaEntityTransferQueue.h>

#include <chrono>
#include <utility>

namespace torch_lms {
namespace {

constexpr auto kMomentForOps = std::chrono::microseconds(50);

} // namespace

void CudaEntityTransferQueue::work() {
  try {
    if (on_worker_start_) {
      on_worker_start_();
    }
  } catch (...) {
    store_error(std::current_exception());
  }
  for (;;) {
    Queued next{nullptr, 0};
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
      } else if (in_flight_.empty() && stopping_) {
        return;
      }
    }
    if (next.entity != nullptr) {
      run(std::move(next));
    } else if (!in_flight_.empty()) {
      finish_oldest();
    }
  }
}

void CudaEntityTransferQueue::run(Queued next) {
  {
    std::lock_guard<std::mutex> step(step_mutex_);
    if (direction_ == TransferDirection::kIn || !next.entity->pageout_must_wait()) {
      put_off_in_turn_ = 0;
      waits_for_ops_.store(false, std::memory_order_release);
      begin(std::move(next));
      return;
    }
  }
  put_off(std::move(next));
}

/// Others first; if all have to wait, what is under way; then ops get a moment to end.
void CudaEntityTransferQueue::put_off(Queued next) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (gives_up_on_ops_) {
    lock.unlock();
    waits_for_ops_.store(false, std::memory_order_release);
    FinishedTransfer not_begun;
    not_begun.entity = std::move(next.entity);
    std::lock_guard<std::mutex> step(step_mutex_);
    finish(std::move(not_begun), next.epoch);
    return;
  }
  queued_.push_back(std::move(next));
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

/// Within a step, as all that follow but `finish_oldest`.
void CudaEntityTransferQueue::begin(Queued next) {
  FinishedTransfer transfer;
  transfer.entity = std::move(next.entity);
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
    finish(std::move(transfer), next.epoch);
    return;
  }
  const size_t nbytes = transfer.entity->nbytes();
  in_flight_bytes_ += nbytes;
  in_flight_.push_back(InFlight{std::move(transfer), nbytes, next.epoch});
}

void CudaEntityTransferQueue::finish_oldest() {
  InFlight oldest = std::move(in_flight_.front());
  in_flight_.pop_front();
  in_flight_bytes_ -= oldest.nbytes;
  const bool out = direction_ == TransferDirection::kOut;
  const FencePtr fence = out ? oldest.transfer.out->fence : oldest.transfer.in->fence;
  std::exception_ptr failed;
  try {
    if (fence != nullptr) {
      fence->wait(); // may be long: not within a step
    }
  } catch (...) {
    failed = std::current_exception();
  }
  std::lock_guard<std::mutex> step(step_mutex_);
  if (failed != nullptr) {
    store_error(failed);
    if (out) {
      oldest.transfer.entity->abandon_pageout(oldest.transfer.out);
    } else {
      oldest.transfer.entity->abandon_pagein(oldest.transfer.in);
    }
  }
  finish(std::move(oldest.transfer), oldest.epoch);
}

void CudaEntityTransferQueue::finish(FinishedTransfer transfer, uint64_t epoch) {
  if (on_finished_) {
    commit_here(std::move(transfer), epoch);
    return;
  }
  std::lock_guard<std::mutex> lock(mutex_);
  finished_.push_back(std::move(transfer));
  finished_count_.store(finished_.size(), std::memory_order_release);
  note_finished(epoch);
}

void CudaEntityTransferQueue::commit_here(FinishedTransfer transfer, uint64_t epoch) {
  const size_t nbytes = transfer.entity->nbytes();
  try {
    on_finished_(transfer);
  } catch (...) {
    store_error(std::current_exception());
  }
  transfer = FinishedTransfer();
  std::lock_guard<std::mutex> lock(mutex_);
  pending_bytes_.fetch_sub(nbytes, std::memory_order_acq_rel);
  note_finished(epoch);
}

/// Under the lock.
void CudaEntityTransferQueue::note_finished(uint64_t epoch) noexcept {
  epochs_.finish(epoch);
  progress_.fetch_add(1, std::memory_order_acq_rel);
  progressed_.notify_all();
}

void CudaEntityTransferQueue::store_error(std::exception_ptr error) {
  std::lock_guard<std::mutex> lock(mutex_);
  error_ = std::move(error);
}

} // namespace torch_lms
