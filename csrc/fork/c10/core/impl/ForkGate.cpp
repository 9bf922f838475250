#include <c10/core/impl/ForkGate.h>

#include <c10/core/impl/SwapDevice.h>

namespace c10 {
namespace impl {
namespace {

thread_local size_t passages_of_thread = 0;

} // namespace

ForkGate& ForkGate::get() {
  static auto* gate = new ForkGate();
  return *gate;
}

ForkGate::Passage::Passage() : outermost_(passages_of_thread == 0 && !on_swap_worker()) {
  if (outermost_) {
    ForkGate& gate = get();
    std::lock_guard<std::mutex> entrance(gate.entrance_);
    std::lock_guard<std::mutex> lock(gate.mutex_);
    ++gate.within_;
    passages_of_thread = 1;
  }
}

ForkGate::Passage::~Passage() {
  if (outermost_) {
    ForkGate& gate = get();
    std::lock_guard<std::mutex> lock(gate.mutex_);
    --gate.within_;
    passages_of_thread = 0;
    gate.left_.notify_all();
  }
}

void ForkGate::close() {
  entrance_.lock();
  std::unique_lock<std::mutex> lock(mutex_);
  left_.wait(lock, [this] { return within_ == passages_of_thread; });
  lock.release(); // stays locked
}

void ForkGate::open() noexcept {
  mutex_.unlock();
  entrance_.unlock();
}

} // namespace impl
} // namespace c10
