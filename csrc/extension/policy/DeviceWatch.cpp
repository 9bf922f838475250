#include <extension/policy/DeviceWatch.h>

#include <algorithm>
#include <numeric>
#include <unordered_set>
#include <utility>

namespace torch_lms {
namespace {

void raise_to(std::atomic<size_t>& most, size_t now) {
  size_t known = most.load(std::memory_order_relaxed);
  while (now > known && !most.compare_exchange_weak(known, now, std::memory_order_relaxed)) {
  }
}

/// Whether nobody will say when it is on the device again: it is, or it is on its way out, from
/// which it comes back without a word if a copy fails, or it moves within the device.
bool stays_known(const EntityPtr& entity) {
  if (entity == nullptr || entity->gone()) {
    return false;
  }
  const EntityState now = entity->state();
  return now == EntityState::kResident || is_leaving(now);
}

} // namespace

void DeviceWatch::begin(Device& device, const PolicyOptions& options) {
  options_.store(&options, std::memory_order_release); // the policy's, which stays
  device_.store(&device, std::memory_order_release);
}

void DeviceWatch::end() {
  std::lock_guard<std::mutex> lock(mutex_);
  resident_.clear();
  newly_resident_.clear();
  paged_out_.clear();
  order_ = {};
  paged_out_count_.store(0);
  recent_bytes_ = {};
  largest_recent_bytes_.store(0);
  plan_ = {};
}

size_t DeviceWatch::margin_bytes() const noexcept {
  return std::min(limit_bytes() / options().margin_share, options().max_margin_bytes);
}

void DeviceWatch::note_allocation(size_t nbytes, size_t used_bytes, size_t out_bytes) {
  raise_to(peak_bytes_, used_bytes + nbytes);
  raise_to(cycle_peak_bytes_, used_bytes + nbytes);
  raise_to(recent_peak_bytes_, used_bytes + nbytes + out_bytes);
  if (nbytes >= options().large_bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    recent_bytes_[recent_at_++ % recent_bytes_.size()] = nbytes;
    largest_recent_bytes_.store(
        *std::max_element(recent_bytes_.begin(), recent_bytes_.end()), std::memory_order_relaxed);
  }
}

bool DeviceWatch::take_allocated() noexcept {
  const int64_t budget = device().budget_bytes();
  if (seen_budget_bytes_.load(std::memory_order_relaxed) == budget) {
    return false; // as after most ops: nothing is written that others read
  }
  return seen_budget_bytes_.exchange(budget, std::memory_order_relaxed) != budget;
}

size_t DeviceWatch::largest_recent_bytes() const noexcept {
  return std::min(largest_recent_bytes_.load(std::memory_order_relaxed), limit_bytes() / 6);
}

// --- where entities are ---------------------------------------------------------

void DeviceWatch::note_resident(const EntityPtr& entity) {
  std::vector<EntityPtr> dropped; // destroyed after unlocking
  std::lock_guard<std::mutex> lock(mutex_);
  newly_resident_.push_back(entity);
  sweep_locked(dropped);
}

void DeviceWatch::note_paged_out(const EntityPtr& entity, uint64_t next_use) {
  std::vector<EntityPtr> dropped; // destroyed after unlocking
  std::lock_guard<std::mutex> lock(mutex_);
  paged_out_.emplace(next_use, entity);
  sweep_locked(dropped);
  paged_out_count_.store(paged_out_.size(), std::memory_order_relaxed);
}

/// Under the mutex. `dropped` is destroyed after unlocking.
void DeviceWatch::sort_in_locked(std::vector<EntityPtr>& dropped) {
  for (std::weak_ptr<Entity>& known : newly_resident_) {
    if (EntityPtr entity = known.lock()) {
      resident_[entity.get()] = std::move(known);
      dropped.push_back(std::move(entity));
    }
  }
  newly_resident_.clear();
}

/// While a plan is carried out nobody asks for what is known here, and so nothing comes up.
void DeviceWatch::sweep_locked(std::vector<EntityPtr>& dropped) {
  if (known_locked() < sweep_at_) {
    return;
  }
  sort_in_locked(dropped);
  for (auto at = resident_.begin(); at != resident_.end();) {
    dropped.push_back(at->second.lock());
    const EntityPtr& entity = dropped.back();
    at = stays_known(entity) ? std::next(at) : resident_.erase(at);
  }
  std::unordered_set<const Entity*> seen; // the first time that one is expected will do
  for (auto at = paged_out_.begin(); at != paged_out_.end();) {
    dropped.push_back(at->second.lock());
    const EntityPtr& entity = dropped.back();
    const bool there = entity != nullptr && !entity->gone() &&
                       entity->state() == EntityState::kPagedOut &&
                       seen.insert(entity.get()).second;
    at = there ? std::next(at) : paged_out_.erase(at);
  }
  sweep_at_ = std::max(kSweepAtLeast, 2 * known_locked());
}

std::vector<Victim> DeviceWatch::resident_by_next_use(
    const CycleTracker& cycles,
    uint64_t eligible_from) {
  const CycleShape shape = cycles.shape();
  const uint64_t now = cycles.now();
  std::vector<Victim> victims;
  std::vector<EntityPtr> dropped; // destroyed after unlocking
  {
    std::lock_guard<std::mutex> lock(mutex_);
    sort_in_locked(dropped);
    for (auto at = resident_.begin(); at != resident_.end();) {
      EntityPtr entity = at->second.lock();
      if (!stays_known(entity)) {
        at = resident_.erase(at); // It comes back through note_resident.
        dropped.push_back(std::move(entity));
        continue;
      }
      ++at;
      if (entity->state() == EntityState::kResident && !entity->pinned() &&
          entity->uses.last() >= eligible_from) {
        const UseHistory history = entity->uses.history();
        uint64_t next_use = history.next(now, shape);
        if (next_use < shape.began + shape.length && history.recurs(shape)) {
          next_use = 0; // See Note [What goes out, and what comes back].
        }
        victims.push_back(Victim{next_use, std::move(entity)});
      }
    }
  }
  std::sort(victims.begin(), victims.end(), [](const Victim& a, const Victim& b) {
    return a.next_use > b.next_use;
  });
  // What leaves without a copy costs half as much: it goes first, unless it is needed soon.
  const size_t share =
      shape.length == 0 ? options().soon_share_without_backward : options().soon_share;
  const auto soon = victims.end() - static_cast<std::ptrdiff_t>(victims.size() / share);
  std::stable_partition(
      victims.begin(), soon, [](const Victim& victim) { return victim.entity->keeps_copy(); });
  return victims;
}

/// Under the mutex. `passed_over` is destroyed after unlocking.
std::vector<EntityPtr> DeviceWatch::take_kept_locked(
    size_t nbytes,
    size_t most_bytes,
    std::vector<EntityPtr>& passed_over) {
  std::vector<EntityPtr> taken;
  for (size_t found = 0; found < nbytes && !order_.rest.empty(); order_.rest.pop_back()) {
    EntityPtr entity = order_.rest.back().lock();
    const bool as_it_was = entity != nullptr && entity->state() == EntityState::kResident &&
                           !entity->gone() && !entity->pinned() && entity->uses.last() <= order_.op;
    const bool takes = as_it_was && entity->nbytes() <= most_bytes;
    if (takes) {
      found += entity->nbytes();
    }
    (takes ? taken : passed_over).push_back(std::move(entity));
  }
  return taken;
}

std::vector<EntityPtr> DeviceWatch::choose_victims(
    const CycleTracker& cycles,
    uint64_t eligible_from,
    size_t nbytes,
    size_t most_bytes) {
  const uint64_t now = cycles.now();
  const uint64_t cycle = cycles.shape().number;
  std::vector<EntityPtr> passed_over; // destroyed after unlocking
  const auto take_kept = [&] {
    std::lock_guard<std::mutex> lock(mutex_);
    return take_kept_locked(nbytes, most_bytes, passed_over);
  };
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (now - order_.op > options().ops_to_keep_order || cycle != order_.cycle ||
        eligible_from != order_.eligible_from) {
      order_.rest.clear();
    }
  }
  std::vector<EntityPtr> chosen = take_kept();
  const auto add = [](size_t sum, const EntityPtr& entity) { return sum + entity->nbytes(); };
  if (std::accumulate(chosen.begin(), chosen.end(), size_t{0}, add) >= nbytes) {
    return chosen;
  }
  std::vector<Victim> victims = resident_by_next_use(cycles, eligible_from);
  KeptOrder order{{}, now, cycle, eligible_from};
  order.rest.assign(victims.size(), {});
  std::transform(victims.rbegin(), victims.rend(), order.rest.begin(), [](const Victim& victim) {
    return victim.entity;
  });
  {
    std::lock_guard<std::mutex> lock(mutex_);
    order_ = std::move(order);
  }
  return take_kept();
}

EntityPtr DeviceWatch::next_prefetch(
    const CycleTracker& cycles,
    uint64_t horizon,
    size_t room_bytes) {
  const CycleShape shape = cycles.shape();
  const uint64_t now = cycles.now();
  std::vector<EntityPtr> dropped; // destroyed after unlocking
  std::lock_guard<std::mutex> lock(mutex_);
  while (!paged_out_.empty() && paged_out_.begin()->first < horizon) {
    const auto first = paged_out_.begin();
    EntityPtr entity = first->second.lock();
    const bool there = entity != nullptr && entity->state() == EntityState::kPagedOut;
    if (there && entity->nbytes() > room_bytes) {
      return nullptr;
    }
    const uint64_t expected = first->first;
    paged_out_.erase(first);
    paged_out_count_.store(paged_out_.size(), std::memory_order_relaxed);
    if (!there) {
      dropped.push_back(std::move(entity));
      continue;
    }
    const uint64_t next_use = entity->uses.history().next(now, shape);
    if (shape.length == 0 && next_use <= horizon && next_use - now > now - entity->uses.last()) {
      paged_out_.emplace(next_use, entity); // See Note [What goes out, and what comes back].
      paged_out_count_.store(paged_out_.size(), std::memory_order_relaxed);
      if (next_use > expected) {
        continue; // others may come first
      }
      return nullptr;
    }
    if (next_use >= horizon && next_use > expected) {
      paged_out_.emplace(next_use, entity); // it was not needed after all
      paged_out_count_.store(paged_out_.size(), std::memory_order_relaxed);
      continue;
    }
    return entity;
  }
  return nullptr;
}

// --- the plan -------------------------------------------------------------------

void DeviceWatch::note_request(size_t nbytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  plan_.note_request(nbytes);
}

void DeviceWatch::note_cancelled(size_t nbytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  plan_.note_cancelled(nbytes);
}

void DeviceWatch::note_stays(size_t nbytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  plan_.note_stays(nbytes);
}

void DeviceWatch::end_cycle() {
  const size_t target_bytes = limit_bytes() - margin_bytes();
  peak_bytes_.store(0, std::memory_order_relaxed);
  std::lock_guard<std::mutex> lock(mutex_);
  plan_.end_cycle(target_bytes);
}

size_t DeviceWatch::planned_now_bytes() {
  std::lock_guard<std::mutex> lock(mutex_);
  const size_t seldom = std::max(options().calls_between_plans, known_locked() / 64);
  const size_t missing = plan_.missing_bytes();
  if (missing == 0 || ++calls_since_plan_ < seldom) {
    return 0;
  }
  calls_since_plan_ = 0;
  return missing;
}

} // namespace torch_lms
