#include <extension/transfer/Commits.h>

#include <exception>
#include <iterator>
#include <new>
#include <thread>
#include <utility>

#include <c10/util/Exception.h>
#include <entity/Error.h>

#include <extension/base/ForeignCall.h>
#include <extension/base/ThreadContext.h>

namespace torch_lms {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kTurn_us = 200;

} // namespace

CommitResult Commits::commit_pageout(FinishedTransfer& finished) {
  if (finished.out == nullptr || finished.out->host == nullptr) {
    return CommitResult::kDropped;
  }
  std::unique_ptr<DeviceBlock> garbage;
  try {
    const CommitResult result = finished.entity->commit_pageout(finished.out, &garbage);
    if (result == CommitResult::kCommitted) {
      const auto nbytes = static_cast<int64_t>(finished.entity->nbytes());
      state_.stats.pageouts.fetch_add(1, std::memory_order_relaxed);
      state_.stats.pageout_bytes.fetch_add(nbytes, std::memory_order_relaxed);
      state_.whereabouts.left_device(entity_of(finished.entity));
    }
    return result;
  } catch (const std::bad_alloc&) { // for a few bytes: later, then
    return CommitResult::kInUse;
  }
}

void Commits::commit_pageouts(std::vector<KeepAlive>& dropped, const Device* allocating) {
  std::vector<FinishedTransfer> taken = state_.out.take_finished();
  std::vector<FinishedTransfer> later; // in use, or another device's
  try {
    later.reserve(taken.size());
    dropped.reserve(dropped.size() + taken.size());
  } catch (const std::bad_alloc&) { // for a few bytes: all of them later, then
    state_.out.return_finished(std::move(taken));
    return;
  }
  for (FinishedTransfer& finished : taken) {
    const bool others =
        allocating != nullptr && &entity_of(finished.entity)->device() != allocating;
    if (others || commit_pageout(finished) == CommitResult::kInUse) {
      later.push_back(std::move(finished));
      continue;
    }
    if (finished.out != nullptr) {
      dropped.push_back(std::move(finished.out->keep));
    }
    state_.out.retire(finished.entity->nbytes());
  }
  if (!later.empty()) {
    state_.out.return_finished(std::move(later));
  }
}

/// Note [Page-ins that are not committed]
/// Whoever commits is at the boundary of some op, which has nothing to do with what came in: an
/// error is not for him, and PyTorch would only log it. It is for who waits for page-ins next, and
/// so is the host's want of memory: he is told that all has come. (Want of the device's does not
/// arise here. The worker finds it, before it copies.) What is not in place yet the next use puts
/// there, or says why not.
void Commits::commit_pageins() {
  for (FinishedTransfer& finished : state_.in.take_finished()) {
    try {
      if (finished.in != nullptr && finished.entity->commit_pagein(finished.in)) {
        state_.whereabouts.came(entity_of(finished.entity), AccessResult::kPrefetched);
      } else if (finished.entity->state() == EntityState::kPagedOut) { // for want of room
        state_.whereabouts.stays_out(entity_of(finished.entity));
      }
    } catch (...) {
      std::lock_guard<std::mutex> lock(mutex_);
      failed_ = std::current_exception();
    }
    state_.in.retire(finished.entity->nbytes());
  }
}

void Commits::commit_finished(const Device* allocating) {
  std::vector<KeepAlive> dropped;
  if (state_.out.has_finished() && !in_foreign_call()) {
    commit_pageouts(dropped, allocating);
  }
  if (allocating == nullptr && state_.in.has_finished()) {
    commit_pageins();
  }
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<KeepAlive>& to = allocating != nullptr ? dropped_ : dropped;
  std::vector<KeepAlive>& from = allocating != nullptr ? dropped : dropped_;
  std::move(from.begin(), from.end(), std::back_inserter(to));
  from.clear();
}

void Commits::settle_prefetches() {
  for (const auto& prefetch : state_.arrivals.take_prefetches()) {
    if (prefetch.first->commit_pagein(prefetch.second)) {
      state_.whereabouts.came(prefetch.first, AccessResult::kPrefetched);
    }
  }
}

/// Note [Waits inside of ops]
/// Python code inside of an op (a hook on what is saved, a kernel in Python) may wait for
/// page-outs. Those that ops of other threads hold back it must not wait for: these may wait inside
/// of their ops, too, for page-outs that this thread's op holds back. They go out when the ops are
/// over.
void Commits::wait_pageouts() {
  const bool inside_op = this_thread().op != nullptr;
  const uint64_t last = state_.out.pending_until();
  uint64_t seen = state_.out.progress();
  auto progressed = Clock::now();
  for (bool over = false; !over || state_.out.has_uncommitted();) {
    over = state_.out.is_over(last);
    commit_finished(); // while the others are copied
    // Another thread's commits wait for nobody.
    if (inside_op && (over || state_.out.waits_for_ops()) && !state_.out.is_committing()) {
      break;
    }
    const uint64_t before = seen;
    if (!over) {
      seen = state_.out.wait_for_progress(seen, kTurn_us);
    } else if (state_.out.has_uncommitted()) {
      std::this_thread::sleep_for(kMomentForOps); // an op uses it, or another thread commits it
    }
    if (seen != before || !(over || state_.out.waits_for_ops())) {
      progressed = Clock::now();
    } else if (Clock::now() - progressed > kPatience) {
      throw TransferFailed(
          "expected running ops to let go of storages that are to be paged out, found one still "
          "running after 60 s on another thread; wait for that thread first");
    }
  }
  if (const std::exception_ptr error = state_.out.take_error()) {
    std::rethrow_exception(error);
  }
}

void Commits::wait_pageins() {
  settle_prefetches();
  uint64_t seen = state_.in.progress();
  for (const uint64_t last = state_.in.pending_until(); !state_.in.is_over(last);) {
    commit_finished(); // while the others are copied
    seen = state_.in.wait_for_progress(seen, kTurn_us);
  }
  state_.arrivals.wait();
  for (commit_finished(); state_.in.has_uncommitted(); commit_finished()) {
    std::this_thread::sleep_for(kMomentForOps); // another thread commits it
  }
  try {
    if (const std::exception_ptr error = state_.in.take_error()) {
      std::rethrow_exception(error);
    }
  } catch (const NoRoom&) {
    state_.stats.pagein_failures.fetch_add(1, std::memory_order_relaxed);
  } catch (const c10::OutOfMemoryError&) {
    state_.stats.pagein_failures.fetch_add(1, std::memory_order_relaxed);
  }
  std::exception_ptr failed;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    failed.swap(failed_);
  }
  if (failed != nullptr) {
    std::rethrow_exception(failed);
  }
}

} // namespace torch_lms
