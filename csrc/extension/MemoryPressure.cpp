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
constexpr size_t kMaxMarginBytes = size_t{512} << 20;
constexpr size_t kMaxPrefetchPendingBytes = size_t{2} << 30;
constexpr size_t kContiguousStepBytes = size_t{256} << 20;
constexpr int kForwardNeighbours = 8;
constexpr auto kPatience = std::chrono::seconds(30);

size_t index_of(c10::Device device) {
  return device.is_cuda() ? static_cast<size_t>(device.index()) + 1 : 0;
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

void MemoryPressure::note_resident(const EntityPtr& entity) {
  if (!enabled()) {
    return;
  }
  Watch& watch = watch_of(*entity);
  std::lock_guard<std::mutex> lock(watch.mutex);
  watch.resident.push(Candidate{entity->last_use(), entity});
}

void MemoryPressure::note_paged_out(const EntityPtr& entity) {
  if (!enabled()) {
    return;
  }
  Watch& watch = watch_of(*entity);
  std::lock_guard<std::mutex> lock(watch.mutex);
  watch.paged_out[entity->last_use()] = entity;
}

void MemoryPressure::note_fault(const EntityPtr& entity) {
  if (!enabled()) {
    return;
  }
  Watch& watch = watch_of(*entity);
  std::lock_guard<std::mutex> lock(watch.mutex);
  watch.fault = entity->last_use();
  watch.paged_out.erase(watch.fault);
}

// --- what goes out ----------------------------------------------------------------

size_t MemoryPressure::margin_bytes(const Watch& watch) {
  return std::min(watch.limit_bytes.load() / 32, kMaxMarginBytes);
}

size_t MemoryPressure::reserve_bytes(const Watch& watch) {
  const size_t largest = *std::max_element(watch.recent_bytes.begin(), watch.recent_bytes.end());
  return std::min(margin_bytes(watch) + 2 * largest, watch.limit_bytes.load() / 3);
}

EntityPtr MemoryPressure::next_victim(Watch& watch, std::vector<Candidate>& set_aside) {
  std::lock_guard<std::mutex> lock(watch.mutex);
  while (!watch.resident.empty()) {
    Candidate candidate = watch.resident.top();
    watch.resident.pop();
    EntityPtr entity = candidate.entity.lock();
    if (entity == nullptr || entity->gone() || entity->state() != EntityState::kResident) {
      continue; // It comes back through note_resident.
    }
    if (entity->last_use() != candidate.use) {
      watch.resident.push(Candidate{entity->last_use(), entity});
    } else if (entity->pinned()) {
      set_aside.push_back(std::move(candidate));
    } else {
      return entity;
    }
  }
  return nullptr;
}

size_t MemoryPressure::request_pageouts(Watch& watch, size_t nbytes) {
  std::vector<Candidate> set_aside;
  size_t requested = 0;
  while (requested < nbytes) {
    const EntityPtr victim = next_victim(watch, set_aside);
    if (victim == nullptr) {
      break;
    }
    if (Pager::get().evict(victim)) {
      requested += victim->nbytes();
    } else if (!victim->gone()) {
      set_aside.push_back(Candidate{victim->last_use(), victim});
    }
  }
  std::lock_guard<std::mutex> lock(watch.mutex);
  for (Candidate& candidate : set_aside) {
    watch.resident.push(std::move(candidate));
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
  Pager& pager = Pager::get();
  uint64_t progress = pager.out_queue().progress();
  for (;;) {
    pager.commit_finished();
    const size_t used = device.allocated_bytes();
    if (used + nbytes <= limit) {
      return true;
    }
    RECORD_USER_SCOPE("torch_lms::make_room");
    const size_t over = used + nbytes - limit;
    pager.cancel_prefetches();
    const size_t outgoing = pager.out_queue().pending_bytes();
    if (outgoing < over) {
      request_pageouts(watch, over - outgoing);
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
  size_t requested = 0;
  while (device.contiguous_bytes() < nbytes) {
    if (pager.out_queue().pending_bytes() == 0) {
      const size_t more =
          requested < 2 * nbytes ? request_pageouts(watch, std::min(nbytes, kContiguousStepBytes)) : 0;
      if (more == 0) {
        return;
      }
      requested += more;
    }
    if (!wait_for_pageouts(&progress)) {
      return;
    }
  }
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
  const bool requested =
      request_pageouts(watch, nbytes) != 0 || pager.out_queue().pending_bytes() != 0;
  while (wait_for_pageouts(&progress)) {
  }
  return requested;
}

void MemoryPressure::page_out_ahead(Watch& watch) {
  const size_t limit = watch.limit_bytes.load();
  const size_t used = watch.device->allocated_bytes();
  const size_t outgoing = std::min(used, Pager::get().out_queue().pending_bytes());
  const size_t target = limit - margin_bytes(watch);
  if (used - outgoing > target) {
    request_pageouts(watch, used - outgoing - target);
  }
}

// --- what comes back ----------------------------------------------------------------

EntityPtr MemoryPressure::next_prefetch(Watch& watch, bool backward, size_t room_bytes) {
  std::lock_guard<std::mutex> lock(watch.mutex);
  auto& paged_out = watch.paged_out;
  while (!paged_out.empty()) {
    auto at = backward ? std::prev(paged_out.end()) : paged_out.upper_bound(watch.fault);
    if (at == paged_out.end() || (backward && at->first <= watch.backward_ended)) {
      return nullptr;
    }
    EntityPtr entity = at->second.lock();
    if (entity != nullptr && entity->state() == EntityState::kPagedOut &&
        entity->last_use() == at->first) {
      if (entity->nbytes() > room_bytes) {
        return nullptr;
      }
      if (!backward) {
        watch.fault = at->first;
      }
      paged_out.erase(at);
      return entity;
    }
    paged_out.erase(at); // stale
  }
  return nullptr;
}

void MemoryPressure::prefetch_ahead(Watch& watch) {
  const bool backward = torch::autograd::get_current_graph_task_id() != -1;
  size_t occupied = 0;
  {
    std::lock_guard<std::mutex> lock(watch.mutex);
    note_backward(watch, backward);
    if (watch.paged_out.empty() || (!backward && watch.fault == 0)) {
      return;
    }
    occupied = reserve_bytes(watch);
  }
  Pager& pager = Pager::get();
  const size_t limit = watch.limit_bytes.load();
  occupied += watch.device->allocated_bytes() + pager.in_queue().pending_bytes();
  int neighbours = kForwardNeighbours;
  while (occupied < limit && pager.in_queue().pending_bytes() < kMaxPrefetchPendingBytes) {
    const EntityPtr entity = next_prefetch(
        watch, backward, std::min(limit - occupied, watch.device->contiguous_bytes()));
    if (entity == nullptr || !pager.prefetch_ahead(entity)) {
      break;
    }
    occupied += entity->nbytes();
    if (!backward && --neighbours == 0) {
      break;
    }
  }
  if (!backward) {
    std::lock_guard<std::mutex> lock(watch.mutex);
    watch.fault = 0;
  }
}

void MemoryPressure::note_backward(Watch& watch, bool backward) {
  if (backward && watch.backward_began <= watch.backward_ended) {
    watch.backward_began = Pager::get().next_use();
  } else if (!backward && watch.backward_began > watch.backward_ended) {
    watch.backward_ended = Pager::get().next_use();
  }
}

void MemoryPressure::after_op(const std::vector<EntityPtr>& entities) {
  if (!enabled()) {
    return;
  }
  const Watch* done = nullptr;
  for (const EntityPtr& entity : entities) {
    Watch& watch = watch_of(*entity);
    if (&watch == done || watch.limit_bytes.load() == 0 || watch.device->capturing()) {
      continue;
    }
    done = &watch;
    page_out_ahead(watch);
    prefetch_ahead(watch);
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
    pager.prefetch_ahead(chosen);
  } else if (pager.evict(chosen) && (dice & 12) != 0) {
    uint64_t progress = pager.out_queue().progress();
    wait_for_pageouts(&progress);
  }
}

} // namespace torch_lms
