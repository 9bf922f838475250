#include <entity/OpClock.h>

#include <mutex>

namespace torch_lms {
namespace {

struct Slot {
  std::atomic<uint64_t> running_since{0};
  OpClock::Thread thread = 0;
  Slot* next = nullptr;
};

/// Linked through the slots themselves: a thread's first op must not fail for want of memory.
struct SlotList {
  std::mutex mutex;
  Slot* first = nullptr;
  OpClock::Thread last_thread = 0;
};

SlotList& slot_list() {
  // Never destroyed: threads may outlive static destruction.
  static auto* list = new SlotList();
  return *list;
}

// Read by every op: a plain pointer costs less than an object with a destructor.
thread_local Slot* own_slot __attribute__((tls_model("initial-exec"))) = nullptr;

struct ThreadSlot {
  ThreadSlot() {
    std::lock_guard<std::mutex> lock(slot_list().mutex);
    slot.thread = ++slot_list().last_thread;
    slot.next = slot_list().first;
    slot_list().first = &slot;
    own_slot = &slot;
  }
  ~ThreadSlot() {
    std::lock_guard<std::mutex> lock(slot_list().mutex);
    Slot** at = &slot_list().first;
    while (*at != &slot) {
      at = &(*at)->next;
    }
    *at = slot.next;
    own_slot = nullptr;
  }
  Slot slot;
};

Slot& make_slot() {
  thread_local ThreadSlot slot;
  own_slot = &slot.slot; // also where the thread ends and other destructors run ops
  return slot.slot;
}

Slot& this_thread_slot() {
  return own_slot != nullptr ? *own_slot : make_slot();
}

} // namespace

OpClock& OpClock::get() {
  static auto* clock = new OpClock();
  return *clock;
}

void OpClock::begin_op() noexcept {
  this_thread_slot().running_since.store(
      now_.load(std::memory_order_relaxed), std::memory_order_seq_cst);
}

void OpClock::end_op() noexcept {
  this_thread_slot().running_since.store(0, std::memory_order_release);
}

uint64_t OpClock::tick() noexcept {
  return now_.fetch_add(1, std::memory_order_seq_cst);
}

OpClock::Thread OpClock::this_thread() noexcept {
  return this_thread_slot().thread;
}

bool OpClock::running_since(uint64_t tick, Thread except) noexcept {
  std::lock_guard<std::mutex> lock(slot_list().mutex);
  for (const Slot* slot = slot_list().first; slot != nullptr; slot = slot->next) {
    const uint64_t since = slot->running_since.load(std::memory_order_seq_cst);
    if (slot->thread != except && since != 0 && since <= tick) {
      return true;
    }
  }
  return false;
}

} // namespace torch_lms
