#include <extension/MemoryPressure.h>

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include <ATen/record_function.h>
#include <torch/csrc/autograd/graph_task.h>

#include <extension/OpObserver.h>
#include <extension/Pager.h>

namespace torch_lms {
namespace {

constexpr size_t kLargeBytes = size_t{1} << 20;
constexpr size_t kMaxMarginBytes = size_t{1} << 30;
constexpr size_t kMaxPrefetchPendingBytes = size_t{2} << 30;
constexpr size_t kMaxPrefetchBatchBytes = size_t{1536} << 20;
constexpr int kContiguousTries = 3;
constexpr uint32_t kOpsBetweenPlans = 8;
constexpr uint64_t kUsesToCool = 24;
constexpr auto kPatience = std::chrono::seconds(30);

size_t index_of(c10::Device device) {
  return device.is_cuda() ? static_cast<size_t>(device.index()) + 1 : 0;
}

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

MemoryPressure::Watch& MemoryPressure::watch_of(const Device& device) {
  return watches_[index_of(device.device())];
}

MemoryPressure::Watch& MemoryPressure::watch_of(const EntityStorageImpl& entity) {
  return watch_of(find_device_of(entity));
}

void MemoryPressure::enable(Device& device, size_t limit_bytes) {
  Watch& watch = watch_of(device);
  {
    std::lock_guard<std::mutex> lock(watch.mutex);
    watch.device = &device;
  }
  watch.limit_bytes.store(limit_bytes);
  Pager::get().out_queue().start_actions();
  Pager::get().in_queue().start_actions();
  enabled_.store(true);
}

void MemoryPressure::disable() {
  enabled_.store(false);
  for (Watch& watch : watches_) {
    std::lock_guard<std::mutex> lock(watch.mutex);
    watch.limit_bytes.store(0);
    watch.resident = {};
    watch.paged_out.clear();
    watch.device = nullptr;
  }
}

size_t MemoryPressure::limit_bytes(Device& device) {
  return watch_of(device).limit_bytes.load();
}

// --- where entities are ---------------------------------------------------------

void MemoryPressure::record_use(const EntityPtr& entity) {
  if (enabled()) {
    entity->record_use(cycles_.next_use(), cycles_.shape());
  }
}

void MemoryPressure::note_cancelled(const EntityPtr& entity) {
  if (enabled()) {
    Watch& watch = watch_of(*entity);
    std::lock_guard<std::mutex> lock(watch.mutex);
    watch.requested_bytes -= std::min(watch.requested_bytes, entity->nbytes());
  }
}

void MemoryPressure::note_resident(const EntityPtr& entity) {
  if (!enabled()) {
    return;
  }
  Watch& watch = watch_of(*entity);
  std::lock_guard<std::mutex> lock(watch.mutex);
  watch.resident[entity.get()] = entity;
}

void MemoryPressure::note_paged_out(const EntityPtr& entity) {
  if (!enabled()) {
    return;
  }
  const uint64_t next_use = entity->next_use(cycles_.now(), cycles_.shape());
  Watch& watch = watch_of(*entity);
  std::lock_guard<std::mutex> lock(watch.mutex);
  watch.paged_out.emplace(next_use, entity);
}

// --- what goes out ----------------------------------------------------------------

size_t MemoryPressure::margin_bytes(const Watch& watch) {
  return std::min(watch.limit_bytes.load() / 32, kMaxMarginBytes);
}

size_t MemoryPressure::largest_recent_bytes(const Watch& watch) {
  return *std::max_element(watch.recent_bytes.begin(), watch.recent_bytes.end());
}

/// What may go out, that which is needed last first.
std::vector<MemoryPressure::Victim> MemoryPressure::resident_by_next_use(Watch& watch) {
  const CycleShape shape = cycles_.shape();
  const uint64_t now = cycles_.now();
  std::vector<Victim> victims;
  std::vector<EntityPtr> dropped; // destroyed after unlocking
  {
    std::lock_guard<std::mutex> lock(watch.mutex);
    for (auto at = watch.resident.begin(); at != watch.resident.end();) {
      EntityPtr entity = at->second.lock();
      if (entity == nullptr || entity->state() != EntityState::kResident || entity->gone()) {
        at = watch.resident.erase(at); // It comes back through note_resident.
        dropped.push_back(std::move(entity));
        continue;
      }
      ++at;
      if (!entity->pinned()) {
        uint64_t next_use = entity->next_use(now, shape);
        if (next_use < shape.began + shape.length && entity->recurs(shape)) {
          next_use = 0; // See Note [What goes out, and what comes back].
        }
        victims.push_back(Victim{next_use, std::move(entity)});
      }
    }
  }
  std::sort(victims.begin(), victims.end(), [](const Victim& a, const Victim& b) {
    return a.next_use > b.next_use;
  });
  return victims;
}

size_t MemoryPressure::page_out(Watch& watch, const EntityPtr& entity) {
  if (!Pager::get().evict(entity)) {
    return 0;
  }
  std::lock_guard<std::mutex> lock(watch.mutex);
  watch.requested_bytes += entity->nbytes();
  return entity->nbytes();
}

size_t MemoryPressure::request_pageouts(Watch& watch, size_t nbytes) {
  size_t requested = 0;
  for (const Victim& victim : resident_by_next_use(watch)) {
    if (requested >= nbytes) {
      break;
    }
    requested += page_out(watch, victim.entity);
  }
  return requested;
}

void MemoryPressure::keep_error() {
  const std::exception_ptr error = Pager::get().out_queue().take_error();
  if (error == nullptr) {
    return;
  }
  std::lock_guard<std::mutex> lock(error_mutex_);
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& caught) {
    last_error_ = caught.what();
  }
}

std::string MemoryPressure::last_error() {
  std::lock_guard<std::mutex> lock(error_mutex_);
  return last_error_;
}

/// Waits until a page-out is over and commits. False if none is under way, none
/// can be committed, or page-outs fail.
bool MemoryPressure::wait_for_pageouts(uint64_t* progress) {
  Pager& pager = Pager::get();
  if (pager.out_queue().pending_bytes() == 0) {
    return false;
  }
  const auto start = std::chrono::steady_clock::now();
  const size_t before = pager.out_queue().pending_bytes();
  bool moved = false;
  while (!moved && std::chrono::steady_clock::now() - start < kPatience) {
    *progress = pager.out_queue().wait_for_progress(*progress, 1000);
    pager.commit_finished();
    moved = pager.out_queue().pending_bytes() < before;
    if (!moved && pager.out_queue().has_finished()) {
      // Copied, but another thread's op may still use it.
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }
  pager.stats().wait_us.fetch_add(microseconds_since(start), std::memory_order_relaxed);
  const std::string failed_before = last_error();
  keep_error();
  return moved && last_error() == failed_before;
}

bool MemoryPressure::make_room(Device& device, size_t nbytes) {
  Watch& watch = watch_of(device);
  const size_t limit = watch.limit_bytes.load(std::memory_order_relaxed);
  if (limit == 0 || allocates_for_prefetch() || device.capturing()) {
    return true;
  }
  if (nbytes >= kLargeBytes) {
    std::lock_guard<std::mutex> lock(watch.mutex);
    watch.recent_bytes[watch.recent_at++ % watch.recent_bytes.size()] = nbytes;
  }
  if (device.allocated_bytes() + nbytes <= limit) {
    return true;
  }
  RECORD_USER_SCOPE("torch_lms::make_room");
  // See Note [Room in batches]. Backward frees more than it allocates: it needs no margin.
  const size_t margin =
      in_backward() ? 0 : std::min(margin_bytes(watch), limit - std::min(limit, nbytes));
  Pager& pager = Pager::get();
  pager.cancel_prefetches();
  uint64_t progress = pager.out_queue().progress();
  for (;;) {
    pager.commit_finished();
    const size_t wanted = device.allocated_bytes() + nbytes + margin;
    if (wanted <= limit) {
      return true;
    }
    const size_t outgoing = pager.out_queue().pending_bytes();
    if (outgoing < wanted - limit) {
      if (pager.cancel_last_prefetch()) {
        continue;
      }
      request_pageouts(watch, wanted - limit - outgoing);
    }
    if (!wait_for_pageouts(&progress)) {
      return device.allocated_bytes() + nbytes <= limit;
    }
  }
}

void MemoryPressure::make_contiguous(Device& device, size_t nbytes) {
  Watch& watch = watch_of(device);
  if (nbytes < kLargeBytes || watch.limit_bytes.load(std::memory_order_relaxed) == 0 ||
      allocates_for_prefetch() || device.capturing()) {
    return;
  }
  Pager& pager = Pager::get();
  uint64_t progress = pager.out_queue().progress();
  for (int tries = 0; tries < kContiguousTries && device.contiguous_bytes() < nbytes; ++tries) {
    // What is on its way out anyway may be enough.
    while (device.contiguous_bytes() < nbytes &&
           (wait_for_pageouts(&progress) || pager.cancel_last_prefetch())) {
    }
    if (device.contiguous_bytes() < nbytes && !free_window(watch, nbytes)) {
      return;
    }
  }
}

/// Pages out the fewest bytes that give one free block of `nbytes`, among the half of
/// the entities that are needed last. False if there is no such window.
bool MemoryPressure::free_window(Watch& watch, size_t nbytes) {
  std::vector<Victim> victims = resident_by_next_use(watch);
  victims.resize((victims.size() + 1) / 2);
  std::unordered_map<const void*, EntityPtr> movable;
  for (Victim& victim : victims) {
    if (const void* address = victim.entity->device_address()) {
      movable.emplace(address, std::move(victim.entity));
    }
  }
  size_t best_cost = SIZE_MAX;
  std::vector<const void*> best;
  for (const auto& blocks : watch.device->blocks()) {
    size_t first = 0;
    size_t span = 0;
    size_t cost = 0;
    for (size_t last = 0; last < blocks.size(); ++last) {
      if (!blocks[last].free && movable.count(blocks[last].address) == 0) {
        first = last + 1;
        span = cost = 0;
        continue;
      }
      span += blocks[last].nbytes;
      cost += blocks[last].free ? 0 : blocks[last].nbytes;
      while (span - blocks[first].nbytes >= nbytes) {
        span -= blocks[first].nbytes;
        cost -= blocks[first].free ? 0 : blocks[first].nbytes;
        ++first;
      }
      if (span >= nbytes && cost < best_cost) {
        best_cost = cost;
        best.clear();
        for (size_t i = first; i <= last; ++i) {
          best.push_back(blocks[i].address);
        }
      }
    }
  }
  size_t requested = 0;
  for (const void* address : best) {
    const auto at = movable.find(address);
    requested += at == movable.end() ? 0 : page_out(watch, at->second);
  }
  return requested != 0;
}

bool MemoryPressure::after_out_of_memory(Device& device, size_t nbytes) {
  Watch& watch = watch_of(device);
  if (watch.limit_bytes.load() == 0 || allocates_for_prefetch() || device.capturing()) {
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
  while (wait_for_pageouts(&progress)) {
  }
  return requested;
}

void MemoryPressure::page_out_ahead(Watch& watch, bool backward) {
  const size_t limit = watch.limit_bytes.load();
  const size_t used = watch.device->allocated_bytes();
  const size_t stays = used - std::min(used, Pager::get().out_queue().pending_bytes());
  const size_t margin = margin_bytes(watch);
  {
    std::lock_guard<std::mutex> lock(watch.mutex);
    watch.peak_bytes = std::max(watch.peak_bytes, stays);
  }
  if (backward) {
    return; // it frees more than it allocates
  }
  if (stays > limit - margin) {
    request_pageouts(watch, stays - (limit - margin) + margin / 4);
  } else {
    follow_plan(watch);
  }
}

void MemoryPressure::follow_plan(Watch& watch) {
  size_t missing = 0;
  {
    std::lock_guard<std::mutex> lock(watch.mutex);
    const size_t seldom = std::max<size_t>(kOpsBetweenPlans, watch.resident.size() / 64);
    if (watch.requested_bytes >= watch.planned_bytes || ++watch.ops_since_plan < seldom) {
      return;
    }
    watch.ops_since_plan = 0;
    missing = watch.planned_bytes - watch.requested_bytes;
  }
  const CycleShape shape = cycles_.shape();
  const uint64_t now = cycles_.now();
  for (const Victim& victim : resident_by_next_use(watch)) {
    if (missing == 0 || victim.next_use < shape.began + shape.forward) {
      break; // needed in this forward
    }
    if (now - victim.entity->last_use() >= kUsesToCool) {
      missing -= std::min(missing, page_out(watch, victim.entity));
    }
  }
}

/// A cycle has ended: what would have been enough?
void MemoryPressure::make_plan(Watch& watch) {
  const size_t target = watch.limit_bytes.load() - margin_bytes(watch);
  std::lock_guard<std::mutex> lock(watch.mutex);
  const size_t unneeded = target - std::min(target, watch.peak_bytes);
  watch.planned_bytes = watch.requested_bytes - std::min(watch.requested_bytes, unneeded);
  watch.requested_bytes = 0;
  watch.peak_bytes = 0;
}

// --- what comes back ----------------------------------------------------------------

EntityPtr MemoryPressure::next_prefetch(Watch& watch, bool backward, size_t room_bytes) {
  const CycleShape shape = cycles_.shape();
  const uint64_t now = cycles_.now();
  uint64_t horizon = backward ? UINT64_MAX : UseHistory::kUnknown / 2;
  if (shape.length != 0) {
    horizon = shape.began + (backward ? shape.length : shape.forward);
  }
  std::vector<EntityPtr> dropped; // destroyed after unlocking
  std::lock_guard<std::mutex> lock(watch.mutex);
  while (!watch.paged_out.empty() && watch.paged_out.begin()->first < horizon) {
    const auto first = watch.paged_out.begin();
    EntityPtr entity = first->second.lock();
    const bool there = entity != nullptr && entity->state() == EntityState::kPagedOut;
    if (there && entity->nbytes() > room_bytes) {
      return nullptr;
    }
    const uint64_t expected = first->first;
    watch.paged_out.erase(first);
    if (!there) {
      dropped.push_back(std::move(entity));
      continue;
    }
    const uint64_t next_use = entity->next_use(now, shape);
    if (next_use >= horizon && next_use > expected) {
      watch.paged_out.emplace(next_use, entity); // it was not needed after all
      continue;
    }
    return entity;
  }
  return nullptr;
}

void MemoryPressure::prefetch_ahead(Watch& watch, bool backward) {
  size_t occupied = 0;
  size_t contiguous = 0;
  {
    std::lock_guard<std::mutex> lock(watch.mutex);
    if (watch.paged_out.empty()) {
      return;
    }
    const size_t limit = watch.limit_bytes.load();
    contiguous = std::min(largest_recent_bytes(watch), limit / 4);
    occupied = (backward ? 2 : 1) * contiguous + margin_bytes(watch) / 2;
  }
  Pager& pager = Pager::get();
  const size_t limit = watch.limit_bytes.load();
  occupied += watch.device->allocated_bytes() + pager.in_queue().pending_bytes();
  // In batches, which fill the gaps that a batch of frees has left: see Note [Room in batches].
  const size_t batch = std::min(limit / 16, kMaxPrefetchBatchBytes);
  if (backward && occupied + batch > limit) {
    return;
  }
  while (occupied < limit && pager.in_queue().pending_bytes() < kMaxPrefetchPendingBytes) {
    const EntityPtr entity = next_prefetch(watch, backward, limit - occupied);
    if (entity == nullptr || !pager.prefetch_ahead(entity, contiguous)) {
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
    for (Watch& watch : watches_) {
      if (watch.limit_bytes.load() != 0) {
        make_plan(watch);
      }
    }
  }
  const Watch* done = nullptr;
  for (const EntityPtr& entity : entities) {
    Watch& watch = watch_of(*entity);
    if (&watch == done || watch.limit_bytes.load() == 0 || watch.device->capturing()) {
      continue;
    }
    done = &watch;
    page_out_ahead(watch, backward);
    prefetch_ahead(watch, backward);
  }
}

// --- chaos ----------------------------------------------------------------------------

void MemoryPressure::seed_chaos(uint64_t seed) {
  std::lock_guard<std::mutex> lock(chaos_mutex_);
  random_.seed(seed);
}

void MemoryPressure::chaos(int64_t period) {
  uint64_t dice = 0;
  {
    std::lock_guard<std::mutex> lock(chaos_mutex_);
    dice = random_();
  }
  if (dice % static_cast<uint64_t>(period) != 0) {
    return;
  }
  dice /= static_cast<uint64_t>(period);
  std::vector<EntityPtr> candidates;
  Pager& pager = Pager::get();
  pager.table().for_each([&](const EntityPtr& entity) {
    if (!entity->gone() && !entity->pinned()) {
      candidates.push_back(entity);
    }
  });
  if (candidates.empty()) {
    return;
  }
  const EntityPtr chosen = candidates[(dice >> 8) % candidates.size()];
  if ((dice & 3) == 0) {
    pager.prefetch_ahead(chosen, 0);
  } else if (pager.evict(chosen) && (dice & 12) != 0) {
    uint64_t progress = pager.out_queue().progress();
    wait_for_pageouts(&progress);
  }
}

} // namespace torch_lms
