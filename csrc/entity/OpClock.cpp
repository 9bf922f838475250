#include <entity/OpClock.h>

#include <pthread.h>

#include <mutex>

namespace torch_lms {

/// Linked through the slots themselves: a thread's first op must not fail for want of memory.
struct OpClock::SlotList {
  std::mutex mutex;
  Slot* first = nullptr;
  Thread last_thread = 0;
};

struct OpClock::ThreadSlot {
  ThreadSlot() {
    watch_forks();
    std::lock_guard<std::mutex> lock(slot_list().mutex);
    slot.thread = ++slot_list().last_thread;
    slot.next = slot_list().first;
    slot_list().first = &slot;
    own_slot_ = &slot;
  }
  ~ThreadSlot() {
    std::lock_guard<std::mutex> lock(slot_list().mutex);
    Slot** at = &slot_list().first;
    while (*at != &slot) {
      at = &(*at)->next;
    }
    *at = slot.next;
    own_slot_ = nullptr;
  }
  Slot slot;
};

OpClock OpClock::clock_;
__thread OpClock::Slot* OpClock::own_slot_ = nullptr;

OpClock::SlotList& OpClock::slot_list() {
  // Never destroyed: threads may outlive static destruction.
  static auto* list = new SlotList();
  return *list;
}

/// A lock that another thread holds at a fork stays held in the child, whose thread takes it when
/// it ends. So the one that forks holds it meanwhile.
void OpClock::watch_forks() noexcept {
  static const int registered = pthread_atfork(
      [] { slot_list().mutex.lock(); },
      [] { slot_list().mutex.unlock(); },
      [] { slot_list().mutex.unlock(); });
  static_cast<void>(registered);
}

OpClock::Slot& OpClock::make_slot() noexcept {
  thread_local ThreadSlot slot;
  own_slot_ = &slot.slot; // also where the thread ends and other destructors run ops
  return slot.slot;
}

uint64_t OpClock::tick() noexcept {
  return now_.fetch_add(1, std::memory_order_seq_cst);
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
