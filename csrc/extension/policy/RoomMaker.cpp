#include <extension/policy/RoomMaker.h>

#include <algorithm>
#include <new>

#include <ATen/record_function.h>
#include <c10/util/Exception.h>
#include <entity/Error.h>

#include <extension/base/Backward.h>
#include <extension/base/Interpreter.h>
#include <extension/base/ThreadContext.h>
#include <extension/policy/MemoryReport.h>

namespace torch_lms {
namespace {

using Clock = Pageouts::Clock;
using Progress = Pageouts::Progress;

} // namespace

Room::Answer RoomMaker::make_room(Device& device, size_t nbytes) {
  note_made(device, nbytes);
  if (device.limit_bytes() == 0 || this_thread().for_prefetch || device.capturing() ||
      wakefulness_.fill_budget(device, nbytes)) {
    return Answer::kFits;
  }
  if (wakefulness_.attention() == Attention::kAsleep) {
    wakefulness_.arm();
    if (wakefulness_.fill_budget(device, nbytes)) {
      return Answer::kFits;
    }
  }
  if (!wakefulness_.may_vacate()) {
    return give_way(device, nbytes);
  }
  RECORD_USER_SCOPE("torch_lms::make_room");
  const WithoutGil no_gil;
  const OpWaits waits(*state_.listener, device);
  const Answer answer = wait_for_room(device, nbytes);
  const size_t inputs = this_thread().op_input_bytes;
  if (answer == Answer::kRefuse && this_thread().is_own() &&
      device.use().allocated_bytes + nbytes <= device.limit_bytes() + inputs) {
    this_thread().op_refused = true; // See Note [Ops larger than the limit]: once.
    return give_way(device, nbytes);
  }
  wakefulness_.fill_budget(device, nbytes);
  return answer;
}

/// See Note [Foreign calls]. No page-out may begin either: what is written through an address
/// after the copy would be lost. The next op that is not inside the call makes up for it.
Room::Answer RoomMaker::give_way(Device& device, size_t nbytes) {
  state_.note_allocation(device, nbytes, device.use().allocated_bytes);
  state_.gave_way.store(true, std::memory_order_relaxed);
  state_.pager.stats().limit_exceeded.fetch_add(1, std::memory_order_relaxed);
  TORCH_WARN_ONCE(
      "torch_lms: expected to make room within the limit of ",
      device.limit_bytes(),
      " bytes, found nothing that may go out now (",
      this_thread().op_refused
          ? "an op's inputs, which it reads from the host the next time"
          : "a call of another extension's code may be using the address of any tensor",
      "); the limit gives way until it returns. Further cases are counted in "
      "torch_lms.stats().limit_exceeded.");
  return Answer::kGiveWay;
}

/// What the op has freed since it began, or other threads have, counts no more.
void RoomMaker::note_made(Device& device, size_t nbytes) {
  ThreadContext& op = this_thread();
  if (op.large_on != &device || !op.is_own()) {
    return;
  }
  op.op_allocated_bytes += nbytes;
  const size_t held = state_.pager.held_bytes(device) + nbytes;
  const size_t made = std::min(held - std::min(held, op.before_op_bytes), op.op_allocated_bytes);
  op.op_made_bytes = std::max(op.op_made_bytes, made);
}

Room::Answer RoomMaker::refuse(Refusal why) {
  this_thread().refusal = why;
  return Answer::kRefuse;
}

/// See Note [Room in batches]. Backward frees more than it allocates, and a plan knows what goes
/// out: they need no margin.
size_t RoomMaker::margin_beside(Device& device, size_t nbytes) {
  const size_t limit = device.limit_bytes();
  return in_backward() || state_.planned.load(std::memory_order_relaxed)
             ? 0
             : std::min(state_.watch_of(device).margin_bytes(), limit - std::min(limit, nbytes));
}

Room::Answer RoomMaker::wait_for_room(Device& device, size_t nbytes) {
  const size_t limit = device.limit_bytes();
  const auto deadline = Clock::now() + state_.options.patience_in_all;
  const size_t margin = margin_beside(device, nbytes);
  pageouts_.forget_errors();
  state_.pager.requests().cancel_prefetches();
  uint64_t progress = state_.pager.out_queue().progress();
  auto moved = Clock::now();
  size_t most_bytes = SIZE_MAX; // of a storage: for a larger one the host has had no room
  for (int failures = 0; Clock::now() < deadline;) {
    state_.pager.commit_finished();
    const size_t used = device.use().allocated_bytes;
    const size_t wanted = used + nbytes + margin;
    if (wanted <= limit) {
      return Answer::kFits;
    }
    // What was asked for by hand may be waiting for the very op that waits here.
    CudaEntityTransferQueue& queue = state_.pager.out_queue();
    const size_t outgoing = queue.waits_for_ops() ? 0 : queue.pending_bytes();
    size_t requested = 0;
    if (outgoing < wanted - limit) {
      if (state_.placeholders.lend_last() || state_.pager.requests().cancel_last_prefetch()) {
        continue;
      }
      requested = pageouts_.request(device, wanted - limit - outgoing, most_bytes);
    }
    const Progress now = pageouts_.wait(&progress, deadline);
    if (now == Progress::kMoved || device.use().allocated_bytes < used) {
      moved = Clock::now();
      continue;
    }
    if (used + nbytes <= limit) {
      return Answer::kFits; // without a margin
    }
    if (now == Progress::kFailed) {
      // It may be the failure of an earlier request: once these are over, the next counts.
      if (++failures > 1) {
        most_bytes = std::min(most_bytes, outgoing + requested) / 2;
      }
      pageouts_.wait_for_all(&progress, deadline);
    } else if (outgoing + requested == 0 && failures > 1) {
      return refuse(Refusal::kPageoutsFail);
    } else if (outgoing + requested == 0 && !pageouts_.others_may_let_go(moved)) {
      return refuse(Refusal::kNothingToGo);
    } // else another thread has committed what this one was about to wait for
  }
  return refuse(Refusal::kPageoutsTakeLong);
}

void RoomMaker::wait_for_pageouts(Device& device, size_t most_bytes) {
  CudaEntityTransferQueue& queue = state_.pager.out_queue();
  if (device.capturing() || !wakefulness_.may_vacate()) {
    return;
  }
  RECORD_USER_SCOPE("torch_lms::wait_for_pageouts");
  const WithoutGil no_gil;
  const OpWaits waits(*state_.listener, device);
  const auto deadline = Clock::now() + state_.options.patience;
  uint64_t progress = queue.progress();
  while (queue.pending_bytes() > most_bytes && !queue.waits_for_ops() &&
         pageouts_.wait(&progress, deadline) == Progress::kMoved) {
  }
}

Room::Answer RoomMaker::after_out_of_memory(Device& device, size_t nbytes) {
  this_thread().refusal = Refusal::kByDevice;
  if (device.limit_bytes() == 0 || this_thread().for_prefetch || device.capturing()) {
    return Answer::kRefuse;
  }
  if (!wakefulness_.may_vacate()) {
    return give_way(device, nbytes);
  }
  const WithoutGil no_gil;
  const OpWaits waits(*state_.listener, device);
  state_.pager.stats().allocation_retries.fetch_add(1, std::memory_order_relaxed);
  state_.placeholders.release();
  state_.pager.requests().cancel_prefetches();
  const auto deadline = Clock::now() + state_.options.patience;
  uint64_t progress = state_.pager.out_queue().progress();
  while (state_.pager.requests().cancel_last_prefetch()) {
  }
  const bool requested =
      pageouts_.request(device, nbytes) != 0 || state_.pager.out_queue().pending_bytes() != 0;
  while (pageouts_.wait(&progress, deadline) == Progress::kMoved) {
  }
  return requested ? Answer::kFits : Answer::kRefuse;
}

void RoomMaker::allocation_begins(Device& device) {
  state_.listener->wait_begins(device);
}

void RoomMaker::allocation_ends(Device& device) noexcept {
  state_.listener->wait_ends(device);
}

void RoomMaker::vacate_finished(Device& device) {
  if (wakefulness_.enabled() && state_.pager.out_queue().has_finished() &&
      !wakefulness_.wants_boundary()) {
    state_.pager.commit_finished(&device);
  }
}

void RoomMaker::before_capture() {
  const WithoutGil no_gil;
  state_.placeholders.release();
  state_.pager.requests().cancel_prefetches();
  try {
    state_.pager.wait_pageouts();
  } catch (const TransferFailed&) { // The device is in error, or one is still under way.
    throw;
  } catch (const Error&) { // The host was full, maybe long ago: what did not go out is in place.
  } catch (const std::bad_alloc&) {
  }
  state_.pager.wait_pageins();
}

std::string RoomMaker::explain(Device& device, size_t nbytes) {
  this_thread().op_refused |= this_thread().is_own();
  const MemoryReport held = report_memory(device, state_, wakefulness_);
  return text_of_refusal(device, nbytes, held) + pageouts_.last_error();
}

} // namespace torch_lms
