#include <extension/policy/Wakefulness.h>

#include <algorithm>

#include <entity/OpClock.h>

#include <extension/base/ForeignCall.h>
#include <extension/base/Interpreter.h>

namespace torch_lms {
namespace {

// Python passes nothing to what it calls between two instructions.
std::atomic<Wakefulness*> main_thread_waits{nullptr};

} // namespace

void Wakefulness::end_cycle() {
  std::unique_lock<std::mutex> lock(mutex_);
  if (attention() == Attention::kOff) {
    return;
  }
  state_.pager.kept_copies().release_of_dead();
  const bool sleeps = may_sleep();
  note_boundary(); // whatever was running when a cycle began has ended
  cycle_began_.store(state_.cycles.now(), std::memory_order_relaxed);
  other_threads_.store(false, std::memory_order_relaxed);
  state_.pager.devices().for_each([this](Device& device) {
    if (device.limit_bytes() != 0) {
      state_.watch_of(device).end_cycle();
    }
  });
  if (sleeps) {
    sleep();
    lock.unlock();
    // Nobody would notice an op that looks at more than a storage's bytes. To hold a storage may
    // take Python's lock, whose holder may wait for the mutex.
    state_.pager.kept_copies().unwatch_all();
  } else if (attention() == Attention::kLearning) {
    attention_.store(Attention::kArmed);
  }
}

bool Wakefulness::may_sleep() {
  bool fits = !state_.pager.active() && !other_threads_.load(std::memory_order_relaxed);
  state_.pager.devices().for_each([&](Device& device) {
    const size_t limit = device.limit_bytes();
    const size_t peak = std::max(
        state_.watch_of(device).peak_bytes(), limit == 0 ? 0 : device.use().allocated_bytes);
    fits = fits && (limit == 0 || peak < limit / 4 * state_.options.sleep_below_quarters);
  });
  return fits;
}

void Wakefulness::sleep() {
  attention_.store(Attention::kAsleep);
  state_.pager.kept_copies().keep(false);
  state_.pager.devices().for_each([this](Device& device) {
    if (device.limit_bytes() != 0) {
      fill_budget(device, 0);
    }
  });
  state_.feed->stop();
}

void Wakefulness::learn() {
  std::lock_guard<std::mutex> lock(mutex_);
  attention_.store(Attention::kLearning);
  eligible_from_.store(0);
  cycle_began_.store(state_.cycles.now());
  state_.feed->start();
}

void Wakefulness::end() {
  // Another thread may have looked at the attention, and be about to change it: it is done first.
  std::lock_guard<std::mutex> lock(mutex_);
  attention_.store(Attention::kOff);
}

void Wakefulness::arm() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (attention() != Attention::kAsleep) {
    return;
  }
  state_.pager.kept_copies().keep(true); // first: nothing is unwatched any more
  attention_.store(Attention::kArmed);
  eligible_from_.store(UINT64_MAX);
  boundary_thread_.store(OpClock::this_thread());
  boundary_wanted_.store(true, std::memory_order_release);
  state_.feed->start();
  main_thread_waits.store(this);
  if (interpreter().at_next_instruction != nullptr) {
    interpreter().at_next_instruction([] { main_thread_waits.load()->note_quiet(); });
  }
}

void Wakefulness::note_quiet() noexcept {
  if (!other_threads_.load(std::memory_order_relaxed)) {
    note_boundary();
    eligible_from_.store(0);
  }
}

void Wakefulness::note_node_begins() noexcept {
  if (wants_boundary() && boundary_thread_.load() == OpClock::this_thread()) {
    note_boundary();
  }
}

void Wakefulness::note_boundary() noexcept {
  bool wanted = true;
  if (boundary_wanted_.compare_exchange_strong(wanted, false)) {
    eligible_from_.store(state_.cycles.now() + 1);
  }
}

void Wakefulness::wake() {
  if (attention() == Attention::kAsleep) {
    arm();
    note_boundary();
  }
}

bool Wakefulness::may_vacate() const {
  return !wants_boundary() && !in_foreign_call();
}

bool Wakefulness::fill_budget(Device& device, size_t nbytes) {
  const bool asleep = attention() == Attention::kAsleep;
  const size_t limit = device.limit_bytes();
  const size_t most = asleep ? limit / 4 * state_.options.sleep_below_quarters : limit;
  const size_t used = device.use().allocated_bytes;
  if (used > most || nbytes > most - used) {
    device.grant(0, state_.options.large_bytes);
    return false;
  }
  state_.note_allocation(device, nbytes, used);
  // Awake, the peak of a cycle is to be known within a small share of the limit.
  const size_t left = most - used - nbytes;
  device.grant(
      asleep ? left : std::min(left, limit / state_.options.peak_share),
      asleep ? SIZE_MAX : state_.options.large_bytes);
  return true;
}

} // namespace torch_lms
