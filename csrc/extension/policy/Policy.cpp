#include <extension/policy/Policy.h>

#include <algorithm>
#include <sstream>
#include <thread>
#include <utility>

#include <ATen/record_function.h>
#include <entity/Error.h>
#include <entity/OpClock.h>

#include <extension/base/Backward.h>
#include <extension/base/ErrorText.h>
#include <extension/base/ForeignCall.h>
#include <extension/base/Interpreter.h>
#include <extension/base/ThreadContext.h>
#include <extension/transfer/PageoutBatch.h>

namespace torch_lms {
namespace {

// Python passes nothing to what it calls between two instructions.
std::atomic<Policy*> main_thread_waits{nullptr};

/// A limit that would do, where `nbytes` would just do at one moment: small tensors, which do not
/// move, come and go, and the next op may find a few more of them.
size_t with_small_ones(size_t nbytes) noexcept {
  constexpr size_t kStepBytes = size_t{64} << 10;
  return (nbytes + nbytes / 256 + kStepBytes - 1) / kStepBytes * kStepBytes;
}

/// While one lives the op on this thread waits.
class OpWaits {
 public:
  OpWaits(PolicyListener& listener, Device& device) : listener_(listener), device_(device) {
    listener_.wait_begins(device_);
  }
  ~OpWaits() {
    listener_.wait_ends(device_);
  }
  OpWaits(const OpWaits&) = delete;
  OpWaits& operator=(const OpWaits&) = delete;

 private:
  PolicyListener& listener_;
  Device& device_;
};

int64_t microseconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration_cast<std::chrono::microseconds>(
             std::chrono::steady_clock::now() - start)
      .count();
}

} // namespace

Policy::Policy(Pager& pager, PolicyOptions options) : pager_(pager), options_(options) {
  pager_.set_listener(this);
}

void Policy::enable(Device& device, size_t limit_bytes, size_t min_bytes) {
  if (!enabled()) {
    cycles_.forget();
  }
  watch_of(device).begin(device, options_);
  pager_.out_queue().start_actions();
  pager_.in_queue().start_actions();
  if (min_bytes > tracked_from_bytes_.load(std::memory_order_relaxed)) {
    pager_.look_for_all(); // smaller ones may be out
  }
  tracked_from_bytes_.store(min_bytes, std::memory_order_relaxed);
  attention_.store(Attention::kLearning);
  pager_.keep_copies(true);
  // What is known already, from paging by hand or from the last time.
  pager_.table().for_each([&](const EntityPtr& entity) {
    if (entity->gone() || &entity->device() != &device) {
      return;
    }
    if (entity->state() == EntityState::kPagedOut) {
      was_paged_out(entity);
    } else {
      became_resident(entity);
    }
  });
  device.limit(limit_bytes, *this);
  learn();
  device.note_busy_streams();
  if (!fill_budget(device, 0) && may_vacate()) {
    const WithoutGil no_gil;
    wait_for_room(device, 0); // what has no room yet may find it at the first op
  }
}

void Policy::disable() {
  attention_.store(Attention::kOff);
  pager_.devices().for_each([](Device& device) { device.unlimit(); });
  for (DeviceWatch& watch : watches_) {
    watch.end();
  }
  pager_.keep_copies(false);
  feed_->stop();
}

void Policy::track_none() {
  if (pager_.active()) {
    pager_.look_for_all(); // what has found no room
  }
  tracked_from_bytes_.store(SIZE_MAX, std::memory_order_relaxed);
}

void Policy::track_all(size_t min_bytes) {
  tracked_from_bytes_.store(min_bytes, std::memory_order_relaxed);
  feed_->start();
}

// --- where entities are ---------------------------------------------------------

void Policy::became_resident(const EntityPtr& entity) {
  if (enabled()) {
    watch_of(entity->device()).note_resident(entity);
  }
}

void Policy::was_paged_out(const EntityPtr& entity) {
  if (enabled()) {
    const uint64_t next = entity->uses.history().next(cycles_.now(), cycles_.shape());
    watch_of(entity->device()).note_paged_out(entity, next);
  }
}

void Policy::was_cancelled(const EntityPtr& entity) {
  if (enabled()) {
    watch_of(entity->device()).note_cancelled(entity->nbytes());
  }
}

// --- what goes out ----------------------------------------------------------------

/// Returns the bytes that go, or have gone.
size_t Policy::page_out(Device& device, const std::vector<EntityPtr>& entities) {
  if (in_foreign_call()) { // It may be about to write: a copy that is made now would be stale.
    return 0;
  }
  size_t nbytes = 0;
  const bool may_drop = !wants_boundary();
  PageoutBatch batch(pager_);
  try {
    for (const EntityPtr& entity : entities) {
      if (may_drop && entity->keeps_copy() && pager_.drop_unwritten(entity)) {
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
    watch_of(device).note_request(nbytes);
  }
  return nbytes;
}

size_t Policy::request_pageouts(Device& device, size_t nbytes) {
  return page_out(device, watch_of(device).choose_victims(cycles_, eligible_from_.load(), nbytes));
}

/// Whether a page-out has failed since the last call.
bool Policy::keep_error() {
  const std::exception_ptr error = pager_.out_queue().take_error();
  if (error == nullptr) {
    return false;
  }
  std::lock_guard<std::mutex> lock(error_mutex_);
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& caught) {
    last_error_ = text_of(caught);
  }
  return true;
}

void Policy::forget_error() {
  std::lock_guard<std::mutex> lock(error_mutex_);
  last_error_.clear();
}

std::string Policy::last_error() {
  std::lock_guard<std::mutex> lock(error_mutex_);
  return last_error_;
}

/// Waits until a page-out is over and commits.
Policy::Progress Policy::wait_for_pageouts(uint64_t* progress, Clock::time_point deadline) {
  CudaEntityTransferQueue& queue = pager_.out_queue();
  const size_t before = queue.pending_bytes();
  if (before == 0) {
    return keep_error() ? Progress::kFailed : Progress::kNothingUnderWay;
  }
  const auto start = Clock::now();
  const auto end = std::min(deadline, start + options_.patience);
  bool moved = false;
  auto copied = start; // when something was copied last
  while (!moved && Clock::now() < end) {
    const uint64_t seen = *progress;
    *progress = queue.wait_for_progress(seen, 1000);
    pager_.commit_finished();
    moved = queue.pending_bytes() < before;
    const bool held = queue.has_finished() || queue.waits_for_ops();
    if (*progress != seen || !held) {
      copied = Clock::now();
    } else if (Clock::now() - copied > options_.patience_with_ops) {
      break;
    }
    if (!moved && queue.has_finished()) {
      // Copied, but another thread's op may still use it.
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }
  pager_.stats().wait_us.fetch_add(microseconds_since(start), std::memory_order_relaxed);
  if (keep_error()) {
    return Progress::kFailed;
  }
  return moved ? Progress::kMoved : Progress::kNothingUnderWay;
}

/// Nothing can go out now, but other threads' ops hold their inputs only until they end, and what
/// other threads are about to page out is in no queue yet. Waits a moment; false if that has been
/// `since` too long.
bool Policy::others_may_let_go(Clock::time_point since) {
  const bool ops = OpClock::get().running_since(UINT64_MAX);
  if (Clock::now() - since > (ops ? options_.patience_with_ops * 2 : options_.patience_alone)) {
    return false;
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return true;
}

// --- room -------------------------------------------------------------------------

bool Policy::may_vacate() const {
  return !wants_boundary() && !in_foreign_call();
}

/// Grants what is left to the limit, or to the watermark. False if that is too little.
bool Policy::fill_budget(Device& device, size_t nbytes) {
  const bool asleep = attention() == Attention::kAsleep;
  const size_t limit = device.limit_bytes();
  const size_t most = asleep ? limit / 4 * options_.sleep_below_quarters : limit;
  const size_t used = device.use().allocated_bytes;
  if (used > most || nbytes > most - used) {
    device.grant(0, options_.large_bytes);
    return false;
  }
  note_allocation(device, nbytes, used);
  // Awake, the peak of a cycle is to be known within a small share of the limit.
  const size_t left = most - used - nbytes;
  device.grant(
      asleep ? left : std::min(left, limit / options_.peak_share),
      asleep ? SIZE_MAX : options_.large_bytes);
  return true;
}

void Policy::note_allocation(Device& device, size_t nbytes, size_t used_bytes) {
  watch_of(device).note_allocation(nbytes, used_bytes, pager_.off_device_bytes());
}

Room::Answer Policy::make_room(Device& device, size_t nbytes) {
  if (device.limit_bytes() == 0 || this_thread().for_prefetch || device.capturing() ||
      fill_budget(device, nbytes)) {
    return Answer::kFits;
  }
  if (attention() == Attention::kAsleep) {
    arm();
    if (fill_budget(device, nbytes)) {
      return Answer::kFits;
    }
  }
  if (!may_vacate()) {
    return give_way(device, nbytes);
  }
  RECORD_USER_SCOPE("torch_lms::make_room");
  const WithoutGil no_gil;
  const OpWaits waits(*listener_, device);
  const Answer answer = wait_for_room(device, nbytes);
  const size_t inputs = this_thread().op_input_bytes;
  if (answer == Answer::kRefuse &&
      device.use().allocated_bytes + nbytes <= device.limit_bytes() + inputs) {
    this_thread().op_refused = true; // See Note [Ops larger than the limit]: once.
    return give_way(device, nbytes);
  }
  fill_budget(device, nbytes);
  return answer;
}

/// See Note [Foreign calls]. No page-out may begin either: what is written through an address
/// after the copy would be lost. The next op that is not inside the call makes up for it.
Room::Answer Policy::give_way(Device& device, size_t nbytes) {
  note_allocation(device, nbytes, device.use().allocated_bytes);
  gave_way_.store(true, std::memory_order_relaxed);
  pager_.stats().limit_exceeded.fetch_add(1, std::memory_order_relaxed);
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

Room::Answer Policy::wait_for_room(Device& device, size_t nbytes) {
  const size_t limit = device.limit_bytes();
  const auto deadline = Clock::now() + options_.patience_in_all;
  // See Note [Room in batches]. Backward frees more than it allocates, and a plan knows what goes
  // out: they need no margin.
  const size_t margin =
      in_backward() || planned_.load(std::memory_order_relaxed)
          ? 0
          : std::min(watch_of(device).margin_bytes(), limit - std::min(limit, nbytes));
  forget_error();
  keep_error(); // of what was requested ahead of need
  pager_.cancel_prefetches();
  uint64_t progress = pager_.out_queue().progress();
  auto moved = Clock::now();
  for (int failures = 0; Clock::now() < deadline;) {
    pager_.commit_finished();
    const size_t used = device.use().allocated_bytes;
    const size_t wanted = used + nbytes + margin;
    if (wanted <= limit) {
      return Answer::kFits;
    }
    // What was asked for by hand may be waiting for the very op that waits here.
    CudaEntityTransferQueue& queue = pager_.out_queue();
    const size_t outgoing = queue.waits_for_ops() ? 0 : queue.pending_bytes();
    size_t requested = 0;
    if (outgoing < wanted - limit) {
      if (placeholders_.lend_last() || pager_.cancel_last_prefetch()) {
        continue;
      }
      requested = request_pageouts(device, wanted - limit - outgoing);
    }
    const Progress now = wait_for_pageouts(&progress, deadline);
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
        return Answer::kRefuse;
      }
      while (Clock::now() < deadline &&
             wait_for_pageouts(&progress, deadline) != Progress::kNothingUnderWay) {
      }
    } else if (outgoing + requested == 0 && !others_may_let_go(moved)) {
      return Answer::kRefuse;
    } // else another thread has committed what this one was about to wait for
  }
  return Answer::kRefuse;
}

void Policy::make_contiguous(Device& device, size_t nbytes) {
  if (nbytes < options_.large_bytes || device.limit_bytes() == 0 || this_thread().for_prefetch ||
      device.capturing() || attention() == Attention::kAsleep || device.has_contiguous(nbytes)) {
    return;
  }
  if (!may_vacate()) {
    return;
  }
  RECORD_USER_SCOPE("torch_lms::make_contiguous");
  const WithoutGil no_gil;
  const OpWaits waits(*listener_, device);
  const auto deadline = Clock::now() + options_.patience;
  uint64_t progress = pager_.out_queue().progress();
  for (int tries = 0; tries < options_.contiguous_tries && !device.has_contiguous(nbytes);
       ++tries) {
    CrowdedWindow window = crowded_window(device, nbytes);
    const bool moved = move_aside(window);
    // What is on its way out anyway may be enough.
    while (!device.has_contiguous(nbytes) && Clock::now() < deadline &&
           (wait_for_pageouts(&progress, deadline) == Progress::kMoved ||
            pager_.cancel_last_prefetch())) {
    }
    if (!device.has_contiguous(nbytes) && page_out(device, window.inside) == 0 && !moved) {
      return;
    }
  }
}

CrowdedWindow Policy::crowded_window(Device& device, size_t nbytes) {
  const auto victims = watch_of(device).resident_by_next_use(cycles_, eligible_from_.load());
  return find_crowded_window(device.blocks(), victims, nbytes);
}

/// Moves what lies in a window to other places of the device: that costs next to nothing. What
/// cannot be moved stays in `window`. Returns whether anything has been.
bool Policy::move_aside(CrowdedWindow& window) {
  std::vector<EntityPtr>& inside = window.inside;
  const auto last = std::remove_if(inside.begin(), inside.end(), [&](const EntityPtr& entity) {
    return pager_.relocate(entity, [&](const void* address) { return !window.holds(address); });
  });
  const bool moved = last != inside.end();
  inside.erase(last, inside.end());
  return moved;
}

void Policy::hold_placeholders(Device& device) {
  while (const size_t nbytes = placeholders_.missing_bytes()) {
    if (device.capturing() || device.use().allocated_bytes + nbytes > device.limit_bytes() ||
        !hold_placeholder(device, nbytes)) {
      return;
    }
  }
}

bool Policy::hold_placeholder(Device& device, size_t nbytes) {
  const WithoutGil no_gil;
  if (!device.has_contiguous(nbytes) && may_vacate()) {
    CrowdedWindow window = crowded_window(device, nbytes);
    move_aside(window);
  }
  try {
    placeholders_.hold(device.allocate_placeholder(nbytes), nbytes);
  } catch (const NoRoom&) {
    return false;
  } catch (const c10::OutOfMemoryError&) {
    return false;
  }
  if (device.limit_bytes() == 0) { // since it was looked at
    placeholders_.release();
  }
  return true;
}

Room::Answer Policy::after_out_of_memory(Device& device, size_t nbytes) {
  if (device.limit_bytes() == 0 || this_thread().for_prefetch || device.capturing()) {
    return Answer::kRefuse;
  }
  if (!may_vacate()) {
    return give_way(device, nbytes);
  }
  const WithoutGil no_gil;
  const OpWaits waits(*listener_, device);
  pager_.stats().allocation_retries.fetch_add(1, std::memory_order_relaxed);
  placeholders_.release();
  pager_.cancel_prefetches();
  const auto deadline = Clock::now() + options_.patience;
  uint64_t progress = pager_.out_queue().progress();
  while (pager_.cancel_last_prefetch()) {
  }
  const bool requested =
      request_pageouts(device, nbytes) != 0 || pager_.out_queue().pending_bytes() != 0;
  while (wait_for_pageouts(&progress, deadline) == Progress::kMoved) {
  }
  return requested ? Answer::kFits : Answer::kRefuse;
}

void Policy::allocation_begins(Device& device) {
  listener_->wait_begins(device);
}

void Policy::allocation_ends(Device& device) noexcept {
  listener_->wait_ends(device);
}

void Policy::vacate_finished(Device& device) {
  if (enabled() && pager_.out_queue().has_finished() && !wants_boundary()) {
    pager_.commit_finished(&device);
  }
}

void Policy::before_capture() {
  const WithoutGil no_gil;
  placeholders_.release();
  pager_.cancel_prefetches();
  pager_.wait_pageouts();
  pager_.wait_pageins();
}

// --- ahead of need ------------------------------------------------------------------

/// At the end of an op: keeps the high watermark, or follows the plan.
void Policy::page_out_ahead(Device& device, bool backward) {
  DeviceWatch& watch = watch_of(device);
  const bool beyond = gave_way_.load(std::memory_order_relaxed);
  if ((backward && !beyond) || !watch.take_allocated()) {
    return; // A backward frees more than it allocates; and asking the allocator is slow.
  }
  if (beyond && !may_vacate()) {
    return;
  }
  gave_way_.store(false, std::memory_order_relaxed);
  const size_t limit = device.limit_bytes();
  const size_t used = device.use().allocated_bytes;
  const size_t stays = used - std::min(used, pager_.out_queue().pending_bytes());
  const size_t margin = watch.margin_bytes();
  const size_t high = limit - std::min(limit, margin);
  watch.note_stays(stays);
  if (stays > high) {
    request_pageouts(device, stays - high + margin / 4);
  } else if (cycles_.knows_cycle()) { // See Note [Planned page-outs].
    if (const size_t missing = watch.planned_now_bytes()) {
      page_out_cooled(device, missing);
    }
  }
}

void Policy::page_out_cooled(Device& device, size_t missing_bytes) {
  const CycleShape shape = cycles_.shape();
  const uint64_t now = cycles_.now();
  std::vector<EntityPtr> chosen;
  for (Victim& victim : watch_of(device).resident_by_next_use(cycles_, eligible_from_.load())) {
    if (missing_bytes == 0) {
      break;
    }
    if (victim.next_use < shape.began + shape.forward) {
      continue; // needed in this forward
    }
    if (now - victim.entity->uses.last() >= options_.ops_to_cool) {
      missing_bytes -= std::min(missing_bytes, victim.entity->nbytes());
      chosen.push_back(std::move(victim.entity));
    }
  }
  page_out(device, chosen);
}

void Policy::prefetch_ahead(Device& device, bool backward) {
  DeviceWatch& watch = watch_of(device);
  if (!watch.anything_paged_out() || cycles_.now() % options_.ops_between_prefetches != 0) {
    return;
  }
  const CycleShape shape = cycles_.shape();
  const size_t limit = device.limit_bytes();
  const size_t largest = watch.largest_recent_bytes();
  // Where there is no plan yet, what a layer of inference lets go of is what the next one needs.
  const bool spares_more = backward || shape.length == 0;
  // Beyond the high watermark it would go out again at once.
  const size_t reserve =
      (spares_more ? options_.backward_reserve : options_.forward_reserve) * largest +
      watch.margin_bytes();
  // No more than half of the limit, so that small limits prefetch at all.
  size_t occupied = std::min(reserve, limit / 2) + device.use().allocated_bytes +
                    pager_.in_queue().pending_bytes();
  // See Note [Room in batches].
  if (backward && occupied + std::min(limit / 16, options_.max_prefetch_batch_bytes) > limit) {
    return;
  }
  uint64_t horizon = backward ? UINT64_MAX : UseHistory::kUnknown / 2;
  if (shape.length != 0) {
    horizon = shape.began + (backward ? shape.length : shape.forward);
  }
  while (occupied < limit &&
         pager_.in_queue().pending_bytes() < options_.max_prefetch_pending_bytes) {
    const EntityPtr entity = watch.next_prefetch(cycles_, horizon, limit - occupied);
    if (entity == nullptr ||
        !pager_.prefetch_ahead(entity, options_.contiguous_reserve * largest)) {
      break;
    }
    occupied += entity->nbytes();
  }
}

void Policy::after_op(Device* used, bool on_main_thread, bool of_program, bool backward) {
  if (!enabled()) {
    return;
  }
  if (!on_main_thread && !backward) {
    other_threads_.store(true, std::memory_order_relaxed);
  }
  if (of_program && cycles_.note_phase(backward)) {
    end_cycle();
    listener_->backward_ended();
  } else if (
      !cycles_.knows_cycle() &&
      cycles_.now() - cycle_began_.load(std::memory_order_relaxed) > options_.ops_in_cycle) {
    end_cycle();
  }
  if (used == nullptr || used->limit_bytes() == 0 || used->capturing() ||
      attention() == Attention::kAsleep) {
    return;
  }
  const bool planned = planned_.load(std::memory_order_relaxed);
  if (!planned || gave_way_.load(std::memory_order_relaxed)) {
    page_out_ahead(*used, backward);
  }
  if (!planned) {
    prefetch_ahead(*used, backward);
  }
}

// --- Note [Learn, sleep, arm] ---------------------------------------------------------

void Policy::end_cycle() {
  std::lock_guard<std::mutex> lock(attention_mutex_);
  if (attention() == Attention::kOff) {
    return;
  }
  pager_.release_copies_of_dead();
  const bool sleeps = may_sleep();
  note_boundary(); // whatever was running when a cycle began has ended
  cycle_began_.store(cycles_.now(), std::memory_order_relaxed);
  other_threads_.store(false, std::memory_order_relaxed);
  pager_.devices().for_each([this](Device& device) {
    if (device.limit_bytes() != 0) {
      watch_of(device).end_cycle();
    }
  });
  if (sleeps) {
    sleep();
  } else if (attention() == Attention::kLearning) {
    attention_.store(Attention::kArmed);
  }
}

bool Policy::may_sleep() {
  bool fits = !pager_.active() && !other_threads_.load(std::memory_order_relaxed);
  pager_.devices().for_each([&](Device& device) {
    const size_t limit = device.limit_bytes();
    const size_t peak =
        std::max(watch_of(device).peak_bytes(), limit == 0 ? 0 : device.use().allocated_bytes);
    fits = fits && (limit == 0 || peak < limit / 4 * options_.sleep_below_quarters);
  });
  return fits;
}

void Policy::sleep() {
  attention_.store(Attention::kAsleep);
  pager_.keep_copies(false); // nobody would notice an op that looks at more than a storage's bytes
  pager_.devices().for_each([this](Device& device) {
    if (device.limit_bytes() != 0) {
      fill_budget(device, 0);
    }
  });
  feed_->stop();
}

void Policy::learn() {
  std::lock_guard<std::mutex> lock(attention_mutex_);
  attention_.store(Attention::kLearning);
  eligible_from_.store(0);
  cycle_began_.store(cycles_.now());
  feed_->start();
}

void Policy::arm() {
  std::lock_guard<std::mutex> lock(attention_mutex_);
  if (attention() != Attention::kAsleep) {
    return;
  }
  attention_.store(Attention::kArmed);
  pager_.keep_copies(true);
  eligible_from_.store(UINT64_MAX);
  boundary_thread_.store(OpClock::this_thread());
  boundary_wanted_.store(true, std::memory_order_release);
  feed_->start();
  main_thread_waits.store(this);
  if (interpreter().at_next_instruction != nullptr) {
    interpreter().at_next_instruction([] { main_thread_waits.load()->note_quiet(); });
  }
}

void Policy::note_quiet() noexcept {
  if (!other_threads_.load(std::memory_order_relaxed)) {
    note_boundary();
    eligible_from_.store(0);
  }
}

void Policy::note_node_begins() noexcept {
  if (wants_boundary() && boundary_thread_.load() == OpClock::this_thread()) {
    note_boundary();
  }
}

void Policy::note_boundary() noexcept {
  bool wanted = true;
  if (boundary_wanted_.compare_exchange_strong(wanted, false)) {
    eligible_from_.store(cycles_.now() + 1);
  }
}

void Policy::wake() {
  if (attention() == Attention::kAsleep) {
    arm();
    note_boundary();
  }
}

// --- what holds the memory --------------------------------------------------------------

MemoryReport Policy::report(Device& device) {
  MemoryReport report;
  const DeviceUse use = device.use();
  report.limit_bytes = device.limit_bytes();
  report.allocated_bytes = use.allocated_bytes;
  report.reserved_bytes = use.reserved_bytes;
  size_t known = 0;
  const uint64_t eligible_from = eligible_from_.load();
  pager_.table().for_each([&](const EntityPtr& entity) {
    const EntityState state = entity->state();
    if (&entity->device() != &device || entity->gone() || state == EntityState::kPagedOut ||
        state == EntityState::kInQueued) {
      return;
    }
    known += entity->nbytes();
    (entity->fixed()                                    ? report.fixed_bytes
     : state != EntityState::kResident                  ? report.leaving_bytes
     : entity->pinned()                                 ? report.in_use_bytes
     : enabled() && entity->uses.last() < eligible_from ? report.unseen_bytes
                                                        : report.movable_bytes) += entity->nbytes();
  });
  report.held_bytes = placeholders_.held_bytes(device.device());
  known += report.held_bytes;
  report.other_bytes = use.allocated_bytes - std::min(use.allocated_bytes, known);
  return report;
}

std::string Policy::explain(Device& device, size_t nbytes) {
  this_thread().op_refused = true;
  const MemoryReport held = report(device);
  const char* op = this_thread().op_name;
  std::ostringstream text;
  const size_t stays = held.allocated_bytes - std::min(held.allocated_bytes, held.movable_bytes);
  text << "torch_lms: expected room " << (op != nullptr ? std::string("in ") + op + " " : "")
       << "for a " << (device.device().is_cpu() ? "CPU" : "CUDA") << " tensor of " << nbytes
       << " bytes within the limit of " << held.limit_bytes << " bytes, found "
       << held.allocated_bytes << " bytes in use of which nothing more can be paged out (inputs of "
       << "running ops: " << held.in_use_bytes << ", pinned by the program, a captured graph or a "
       << "collective: " << held.fixed_bytes << ", on their way: " << held.leaving_bytes
       << ", not seen in any op: " << held.unseen_bytes
       << ", small, in private pools, or inside of "
       << "compiled code: " << held.other_bytes << "). Raise the limit, lower min_bytes, or use "
       << "smaller batches; a limit of " << with_small_ones(stays + nbytes)
       << " bytes would do here. " << last_error();
  return text.str();
}

} // namespace torch_lms
