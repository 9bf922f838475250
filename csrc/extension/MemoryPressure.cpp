#include <extension/MemoryPressure.h>

#include <algorithm>
#include <chrono>
#include <thread>
#include <unordered_map>
#include <utility>

#include <ATen/record_function.h>
#include <entity/FreeWindow.h>
#include <torch/csrc/autograd/graph_task.h>

#include <extension/ErrorText.h>
#include <extension/Pager.h>

namespace torch_lms {
namespace {

constexpr size_t kLargeBytes = size_t{1} << 20;
constexpr size_t kMaxPrefetchPendingBytes = size_t{2} << 30;
constexpr size_t kMaxPrefetchBatchBytes = size_t{3} << 30;
// In units of the largest recent allocation: what prefetches leave free.
constexpr size_t kContiguousReserve = 3;
constexpr size_t kForwardReserve = 1;
constexpr size_t kBackwardReserve = 8;
constexpr int kContiguousTries = 3;
constexpr int kTriesForOthers = 2000; // of a millisecond
constexpr uint64_t kUsesToCool = 24;
constexpr auto kPatience = std::chrono::seconds(30);
// With ops of other threads that use what has been copied.
constexpr auto kPatienceWithOps = std::chrono::seconds(1);
constexpr int kMostStalls = 10;

/// Whether the calling thread runs a backward.
bool in_backward() {
  return torch::autograd::get_current_graph_task_id() != -1;
}

int64_t microseconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration_cast<std::chrono::microseconds>(
             std::chrono::steady_clock::now() - start)
      .count();
}

} // namespace

MemoryPressure& MemoryPressure::get() {
  static auto* pressure = new MemoryPressure();
  return *pressure;
}

DeviceWatch& MemoryPressure::watch_of(const Device& device) {
  return watches_[index_of(device.device())];
}

DeviceWatch& MemoryPressure::watch_of(const EntityStorageImpl& entity) {
  return watch_of(find_device_of(entity));
}

void MemoryPressure::enable(Device& device, size_t limit_bytes) {
  watch_of(device).begin(device, limit_bytes);
  Pager::get().out_queue().start_actions();
  Pager::get().in_queue().start_actions();
  enabled_.store(true);
  // What is known already, from paging by hand or from the last time.
  Pager::get().table().for_each([&](const EntityPtr& entity) {
    if (entity->gone() || &find_device_of(*entity) != &device) {
      return;
    }
    if (entity->state() == EntityState::kPagedOut) {
      note_paged_out(entity);
    } else {
      note_resident(entity);
    }
  });
}

void MemoryPressure::disable() {
  enabled_.store(false);
  for (DeviceWatch& watch : watches_) {
    watch.end();
  }
}

// --- where entities are ---------------------------------------------------------

void MemoryPressure::record_use(const EntityPtr& entity) {
  if (enabled()) {
    entity->record_use(cycles_.next_use(), cycles_.shape());
  }
}

void MemoryPressure::note_cancelled(const EntityPtr& entity) {
  if (enabled()) {
    watch_of(*entity).note_cancelled(entity->nbytes());
  }
}

void MemoryPressure::note_resident(const EntityPtr& entity) {
  if (enabled()) {
    watch_of(*entity).note_resident(entity);
  }
}

void MemoryPressure::note_paged_out(const EntityPtr& entity) {
  if (enabled()) {
    watch_of(*entity).note_paged_out(entity, entity->next_use(cycles_.now(), cycles_.shape()));
  }
}

// --- what goes out ----------------------------------------------------------------

size_t MemoryPressure::page_out(DeviceWatch& watch, const EntityPtr& entity) {
  if (!Pager::get().evict(entity)) {
    return 0;
  }
  if (!in_backward()) {
    watch.note_request(entity->nbytes());
  }
  return entity->nbytes();
}

size_t MemoryPressure::request_pageouts(DeviceWatch& watch, size_t nbytes) {
  size_t requested = 0;
  for (const Victim& victim : watch.resident_by_next_use(cycles_)) {
    if (requested >= nbytes) {
      break;
    }
    requested += page_out(watch, victim.entity);
  }
  return requested;
}

/// Whether a page-out has failed since the last call.
bool MemoryPressure::keep_error() {
  const std::exception_ptr error = Pager::get().out_queue().take_error();
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

std::string MemoryPressure::last_error() {
  std::lock_guard<std::mutex> lock(error_mutex_);
  return last_error_;
}

/// Waits until a page-out is over and commits.
MemoryPressure::Progress MemoryPressure::wait_for_pageouts(uint64_t* progress) {
  Pager& pager = Pager::get();
  const size_t before = pager.out_queue().pending_bytes();
  if (before == 0) {
    return keep_error() ? Progress::kFailed : Progress::kNothingUnderWay;
  }
  const auto start = std::chrono::steady_clock::now();
  bool moved = false;
  auto copied = start; // when something was copied last
  while (!moved && std::chrono::steady_clock::now() - start < kPatience) {
    const uint64_t seen = *progress;
    *progress = pager.out_queue().wait_for_progress(seen, 1000);
    pager.commit_finished();
    moved = pager.out_queue().pending_bytes() < before;
    const bool held = pager.out_queue().has_finished() || pager.out_queue().waits_for_ops();
    if (*progress != seen || !held) {
      copied = std::chrono::steady_clock::now();
    } else if (std::chrono::steady_clock::now() - copied > kPatienceWithOps) {
      break;
    }
    if (!moved && pager.out_queue().has_finished()) {
      // Copied, but another thread's op may still use it.
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }
  pager.stats().wait_us.fetch_add(microseconds_since(start), std::memory_order_relaxed);
  if (keep_error()) {
    return Progress::kFailed;
  }
  return moved ? Progress::kMoved : Progress::kNothingUnderWay;
}

/// Nothing can go out now. Ops of other threads hold their inputs only until they end:
/// waits a moment if there are such ops. False if there are none, or for too long.
bool MemoryPressure::others_may_let_go(int* tries) {
  if (++*tries > kTriesForOthers || !OpClock::get().running_since(UINT64_MAX)) {
    return false;
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return true;
}

bool MemoryPressure::make_room(Device& device, size_t nbytes) {
  DeviceWatch& watch = watch_of(device);
  const size_t limit = watch.limit_bytes();
  if (limit == 0 || allocates_for_prefetch() || device.capturing()) {
    return true;
  }
  watch.note_allocation(nbytes);
  if (device.allocated_bytes() + nbytes <= limit) {
    return true;
  }
  RECORD_USER_SCOPE("torch_lms::make_room");
  // See Note [Room in batches]. Backward frees more than it allocates: it needs no margin.
  const size_t margin =
      in_backward() ? 0 : std::min(watch.margin_bytes(), limit - std::min(limit, nbytes));
  Pager& pager = Pager::get();
  pager.cancel_prefetches();
  uint64_t progress = pager.out_queue().progress();
  int stalls = 0;
  int failures = 0;
  for (int tries = 0;;) {
    pager.commit_finished();
    const size_t wanted = device.allocated_bytes() + nbytes + margin;
    if (wanted <= limit) {
      return true;
    }
    const size_t outgoing = pager.out_queue().pending_bytes();
    size_t requested = 0;
    if (outgoing < wanted - limit) {
      if (pager.cancel_last_prefetch()) {
        continue;
      }
      requested = request_pageouts(watch, wanted - limit - outgoing);
    }
    const Progress now = wait_for_pageouts(&progress);
    if (now == Progress::kMoved) {
      continue;
    }
    if (device.allocated_bytes() + nbytes <= limit) {
      return true;
    }
    if (now == Progress::kFailed) {
      // It may be the failure of an earlier request: once these are over, the next counts.
      if (++failures > 1) {
        return false;
      }
      while (wait_for_pageouts(&progress) != Progress::kNothingUnderWay) {
      }
      continue;
    }
    if (pager.out_queue().pending_bytes() != 0) {
      if (++stalls > kMostStalls) {
        return false;
      }
    } else if (outgoing + requested == 0 && !others_may_let_go(&tries)) {
      return false;
    } // else another thread has committed what this one was about to wait for
  }
}

void MemoryPressure::make_contiguous(Device& device, size_t nbytes) {
  DeviceWatch& watch = watch_of(device);
  if (nbytes < kLargeBytes || watch.limit_bytes() == 0 || allocates_for_prefetch() ||
      device.capturing() || device.allocated_bytes() + nbytes <= watch.limit_bytes() / 2) {
    return; // Where half is free, looking costs more than what fragments do.
  }
  Pager& pager = Pager::get();
  uint64_t progress = pager.out_queue().progress();
  for (int tries = 0; tries < kContiguousTries && !device.has_contiguous(nbytes); ++tries) {
    // What is on its way out anyway may be enough.
    while (!device.has_contiguous(nbytes) &&
           (wait_for_pageouts(&progress) == Progress::kMoved || pager.cancel_last_prefetch())) {
    }
    if (!device.has_contiguous(nbytes) && !free_window(watch, nbytes)) {
      return;
    }
  }
}

/// Pages out what gives one free block of `nbytes` at the least cost: the bytes of what
/// is needed late, twice those of what is needed soon; the very next stay. False if
/// there is no such window.
bool MemoryPressure::free_window(DeviceWatch& watch, size_t nbytes) {
  const std::vector<Victim> victims = watch.resident_by_next_use(cycles_);
  std::unordered_map<const void*, size_t> movable; // by address, places in `victims`
  for (size_t i = 0; i < victims.size() - victims.size() / 8; ++i) {
    if (const void* address = victims[i].entity->device_address()) {
      movable.emplace(address, i);
    }
  }
  FreeWindow best;
  std::vector<size_t> chosen;
  for (const auto& blocks : watch.device().blocks()) {
    std::vector<WindowBlock> segment;
    for (const AllocatorBlock& block : blocks) {
      const auto at = movable.find(block.address);
      const size_t weight = at != movable.end() && at->second >= victims.size() / 2 ? 2 : 1;
      segment.push_back(
          {block.nbytes,
           block.free            ? 0
           : at == movable.end() ? WindowBlock::kImmovable
                                 : weight * block.nbytes});
    }
    const FreeWindow window = cheapest_window(segment, nbytes);
    if (window.cost < best.cost) {
      best = window;
      chosen.clear();
      for (size_t i = window.first; i < window.last; ++i) {
        if (!blocks[i].free) {
          chosen.push_back(movable.at(blocks[i].address));
        }
      }
    }
  }
  size_t requested = 0;
  for (const size_t place : chosen) {
    requested += page_out(watch, victims[place].entity);
  }
  return requested != 0;
}

bool MemoryPressure::after_out_of_memory(Device& device, size_t nbytes) {
  DeviceWatch& watch = watch_of(device);
  if (watch.limit_bytes() == 0 || allocates_for_prefetch() || device.capturing()) {
    return false;
  }
  Pager& pager = Pager::get();
  pager.stats().allocation_retries.fetch_add(1, std::memory_order_relaxed);
  pager.cancel_prefetches();
  uint64_t progress = pager.out_queue().progress();
  while (pager.cancel_last_prefetch()) {
  }
  const bool requested =
      request_pageouts(watch, nbytes) != 0 || pager.out_queue().pending_bytes() != 0;
  while (wait_for_pageouts(&progress) == Progress::kMoved) {
  }
  return requested;
}

/// At the end of an op: keeps the high watermark, or follows the plan.
void MemoryPressure::page_out_ahead(DeviceWatch& watch, bool backward) {
  if (backward || !watch.take_allocated()) {
    return; // A backward frees more than it allocates; and asking the allocator is slow.
  }
  const size_t used = watch.device().allocated_bytes();
  const size_t stays = used - std::min(used, Pager::get().out_queue().pending_bytes());
  const size_t margin = watch.margin_bytes();
  const size_t high = watch.limit_bytes() - margin;
  watch.note_stays(stays);
  if (stays > high) {
    request_pageouts(watch, stays - high + margin / 4);
  } else if (const size_t missing = watch.planned_now_bytes()) {
    page_out_cooled(watch, missing);
  }
}

void MemoryPressure::page_out_cooled(DeviceWatch& watch, size_t missing_bytes) {
  const CycleShape shape = cycles_.shape();
  const uint64_t now = cycles_.now();
  for (const Victim& victim : watch.resident_by_next_use(cycles_)) {
    if (missing_bytes == 0 || victim.next_use < shape.began + shape.forward) {
      break; // needed in this forward
    }
    if (now - victim.entity->last_use() >= kUsesToCool) {
      missing_bytes -= std::min(missing_bytes, page_out(watch, victim.entity));
    }
  }
}

// --- what comes back ----------------------------------------------------------------

void MemoryPressure::prefetch_ahead(DeviceWatch& watch, bool backward) {
  if (!watch.anything_paged_out()) {
    return;
  }
  Pager& pager = Pager::get();
  const size_t limit = watch.limit_bytes();
  const size_t largest = watch.largest_recent_bytes();
  const size_t reserve =
      (backward ? kBackwardReserve : kForwardReserve) * largest + watch.margin_bytes() / 2;
  // No more than half of the limit, so that small limits prefetch at all.
  size_t occupied = std::min(reserve, limit / 2) + watch.device().allocated_bytes() +
                    pager.in_queue().pending_bytes();
  // See Note [Room in batches].
  if (backward && occupied + std::min(limit / 16, kMaxPrefetchBatchBytes) > limit) {
    return;
  }
  const CycleShape shape = cycles_.shape();
  uint64_t horizon = backward ? UINT64_MAX : UseHistory::kUnknown / 2;
  if (shape.length != 0) {
    horizon = shape.began + (backward ? shape.length : shape.forward);
  }
  while (occupied < limit && pager.in_queue().pending_bytes() < kMaxPrefetchPendingBytes) {
    const EntityPtr entity = watch.next_prefetch(cycles_, horizon, limit - occupied);
    if (entity == nullptr || !pager.prefetch_ahead(entity, kContiguousReserve * largest)) {
      break;
    }
    occupied += entity->nbytes();
  }
}

void MemoryPressure::after_op(const std::vector<EntityPtr>& entities) {
  if (!enabled()) {
    return;
  }
  const bool backward = in_backward();
  if (cycles_.note_phase(backward)) {
    for (DeviceWatch& watch : watches_) {
      if (watch.limit_bytes() != 0) {
        watch.end_cycle();
      }
    }
  }
  const DeviceWatch* done = nullptr;
  for (const EntityPtr& entity : entities) {
    DeviceWatch& watch = watch_of(*entity);
    if (&watch == done || watch.limit_bytes() == 0 || watch.device().capturing()) {
      continue;
    }
    done = &watch;
    page_out_ahead(watch, backward);
    prefetch_ahead(watch, backward);
  }
}

} // namespace torch_lms
