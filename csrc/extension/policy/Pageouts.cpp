#include <extension/policy/Pageouts.h>

#include <algorithm>
#include <exception>
#include <thread>

#include <entity/Error.h>
#include <entity/OpClock.h>

#include <extension/base/Backward.h>
#include <extension/base/ErrorText.h>
#include <extension/base/ForeignCall.h>
#include <extension/transfer/PageoutBatch.h>

namespace torch_lms {
namespace {

int64_t microseconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration_cast<std::chrono::microseconds>(
             std::chrono::steady_clock::now() - start)
      .count();
}

} // namespace

/// Whether what can be made again is to be dropped: see Note [A host that fills].
bool Pageouts::host_is_short(const Device& device) {
  const HostPoolStats host = device.pool()->stats();
  const size_t quarter = host.limit_bytes / 4;
  const size_t taken = host.used_bytes + state_.pager.out_queue().pending_bytes();
  const size_t left = host.limit_bytes - std::min(host.limit_bytes, taken);
  const bool refused = refused_.load(std::memory_order_relaxed);
  const size_t on_device = std::min(device.limit_bytes(), 3 * quarter);
  if (refused || left <= std::max(2 * quarter, on_device)) {
    state_.listener->host_fills();
  }
  return refused || left <= quarter;
}

/// Up to so many bytes of what can be made again and is needed last.
size_t Pageouts::drop(Device& device, size_t nbytes) {
  if (!wakefulness_.may_vacate()) {
    return 0;
  }
  size_t dropped = 0;
  for (const Victim& victim :
       state_.watch_of(device).resident_by_next_use(state_.cycles, wakefulness_.eligible_from())) {
    if (dropped >= nbytes) {
      break;
    }
    dropped += state_.listener->drop(victim.entity) ? victim.entity->nbytes() : 0;
  }
  return dropped;
}

size_t Pageouts::page_out(Device& device, const std::vector<EntityPtr>& entities) {
  return page_out(device, entities, host_is_short(device));
}

size_t Pageouts::page_out(
    Device& device,
    const std::vector<EntityPtr>& entities,
    bool host_is_short) {
  if (in_foreign_call()) { // It may be about to write: a copy that is made now would be stale.
    return 0;
  }
  size_t nbytes = 0;
  const bool may_drop = !wakefulness_.wants_boundary();
  PageoutBatch batch(state_.pager.out_queue());
  try {
    for (const EntityPtr& entity : entities) {
      if ((may_drop && entity->keeps_copy() && state_.pager.requests().drop_unwritten(entity)) ||
          (may_drop && host_is_short && state_.listener->drop(entity))) {
        nbytes += entity->nbytes();
      } else {
        batch.add(entity);
      }
    }
    batch.submit();
  } catch (const Error&) { // Somebody is waiting for the queue: not now.
  }
  nbytes += batch.bytes();
  if (!in_backward()) {
    state_.watch_of(device).note_request(nbytes);
  }
  return nbytes;
}

size_t Pageouts::request(Device& device, size_t nbytes, size_t most_bytes) {
  const bool is_short = host_is_short(device);
  size_t going = is_short ? drop(device, nbytes) : 0;
  bool others = true;
  while (going < nbytes && others) {
    const std::vector<EntityPtr> victims = state_.watch_of(device).choose_victims(
        state_.cycles, wakefulness_.eligible_from(), nbytes - going, most_bytes);
    going += page_out(device, victims, is_short);
    // Some may have been given other memory, which only shows when they are to go.
    others = std::any_of(
        victims.begin(), victims.end(), [](const EntityPtr& entity) { return entity->gone(); });
  }
  return going;
}

/// Whether a page-out has failed since the last call.
bool Pageouts::keep_error() {
  const std::exception_ptr error = state_.pager.out_queue().take_error();
  if (error == nullptr) {
    return false;
  }
  refused_.store(true, std::memory_order_relaxed);
  std::lock_guard<std::mutex> lock(error_mutex_);
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& caught) {
    last_error_ = text_of(caught);
  }
  return true;
}

void Pageouts::forget_errors() {
  {
    std::lock_guard<std::mutex> lock(error_mutex_);
    last_error_.clear();
  }
  keep_error(); // of what was requested ahead of need
  refused_.store(false, std::memory_order_relaxed);
}

std::string Pageouts::last_error() {
  std::lock_guard<std::mutex> lock(error_mutex_);
  return last_error_;
}

Pageouts::Progress Pageouts::wait(uint64_t* progress, Clock::time_point deadline) {
  CudaEntityTransferQueue& queue = state_.pager.out_queue();
  const size_t before = queue.pending_bytes();
  if (before == 0) {
    return keep_error() ? Progress::kFailed : Progress::kNothingUnderWay;
  }
  const auto start = Clock::now();
  const auto end = std::min(deadline, start + state_.options.patience);
  bool moved = false;
  auto copied = start; // when something was copied last
  while (!moved && Clock::now() < end) {
    const uint64_t seen = *progress;
    *progress = queue.wait_for_progress(seen, 1000);
    state_.pager.commit_finished();
    moved = queue.pending_bytes() < before;
    const bool held = queue.has_finished() || queue.waits_for_ops();
    if (*progress != seen || !held) {
      copied = Clock::now();
    } else if (Clock::now() - copied > state_.options.patience_with_ops) {
      break;
    }
    if (!moved && queue.has_finished()) {
      // Copied, but another thread's op may still use it.
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }
  state_.pager.stats().wait_us.fetch_add(microseconds_since(start), std::memory_order_relaxed);
  if (keep_error()) {
    return Progress::kFailed;
  }
  return moved ? Progress::kMoved : Progress::kNothingUnderWay;
}

void Pageouts::wait_for_all(uint64_t* progress, Clock::time_point deadline) {
  while (Clock::now() < deadline && wait(progress, deadline) != Progress::kNothingUnderWay) {
  }
}

bool Pageouts::others_may_let_go(Clock::time_point since) {
  const bool ops = OpClock::get().running_since(UINT64_MAX);
  if (Clock::now() - since >
      (ops ? state_.options.patience_with_ops * 2 : state_.options.patience_alone)) {
    return false;
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return true;
}

} // namespace torch_lms
