#include <extension/access/OpCallbacks.h>

#include <thread>

#include <extension/access/UnseenOps.h>
#include <extension/base/Interpreter.h>

namespace torch_lms {
namespace {

constexpr auto kTimeToLearn = std::chrono::milliseconds(1);

} // namespace

/// Under the mutex. The new callback is there before the old one goes: no op gets by between.
void OpCallbacks::install(bool outputs) {
  const at::CallbackHandle before = handle_;
  handle_ = at::addGlobalCallback(
      at::RecordFunctionCallback(begin_, end_)
          .needsInputs(true)
          .needsOutputs(outputs)
          .scopes({at::RecordScope::FUNCTION}));
  changed_at_ = std::chrono::steady_clock::now();
  outputs_ = outputs;
  installed_.store(true, std::memory_order_release);
  if (before != at::INVALID_CALLBACK_HANDLE) {
    at::removeCallback(before);
    changed_at_ = std::chrono::steady_clock::now();
  }
}

void OpCallbacks::uninstall() {
  at::removeCallback(handle_);
  changed_at_ = std::chrono::steady_clock::now();
  handle_ = at::INVALID_CALLBACK_HANDLE;
  installed_.store(false, std::memory_order_release);
  settled_ = false;
  recipes_.forget();
}

bool OpCallbacks::wanted() const {
  return fed_ || requests_.load() != 0 || pager_.active() || (by_hand_ && other_threads_);
}

void OpCallbacks::end_requests() {
  by_hand_ = false;
  stop_if_idle();
}

void OpCallbacks::start() {
  std::lock_guard<std::mutex> lock(mutex_);
  fed_ = true;
  if (!observing() || !outputs_) {
    install(/*outputs=*/true);
  }
  pager_.note_all_ops_observed();
}

void OpCallbacks::stop() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    fed_ = false;
    if (observing() && outputs_ && wanted()) {
      install(/*outputs=*/false); // for what is still out
    }
  }
  stop_if_idle();
}

void OpCallbacks::stop_if_idle() {
  if (!observing() || wanted()) {
    return;
  }
  std::lock_guard<std::mutex> lock(mutex_);
  if (observing() && !wanted()) {
    uninstall();
  }
}

void OpCallbacks::hold() {
  mutex_.lock();
  std::this_thread::sleep_until(changed_at_ + kTimeToLearn);
  at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION); // as an op does
  at::hasGlobalCallbacks(); // takes PyTorch's lock: nobody else has it then
}

void OpCallbacks::release() {
  mutex_.unlock();
}

void OpCallbacks::begin_request() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!observing()) {
      install(/*outputs=*/false);
    }
  }
  if (!settled_) {
    settle();
  }
}

/// What began unseen is over, or known: ops by Note [Ops that began unseen], what they have
/// submitted by the streams that are busy.
void OpCallbacks::settle() {
  std::lock_guard<std::mutex> lock(settling_);
  if (settled_) {
    return;
  }
  if (other_threads_) {
    const WithGil gil;
    ++waits_;
    waits_in_vain_ += UnseenOps().wait() ? 0 : 1;
  }
  pager_.devices().for_each([](Device& device) { device.note_busy_streams(); });
  settled_ = true;
}

/// Where nothing has left there is nothing to be observed for, unless to begin again would take a
/// wait for other threads.
void OpCallbacks::end_request() {
  if (requests_.fetch_sub(1) == 1) {
    stop_if_idle();
  }
}

OpCallbacks::Request::Request(OpCallbacks& callbacks) : callbacks_(callbacks) {
  callbacks_.requests_.fetch_add(1);
  try {
    callbacks_.begin_request();
  } catch (...) {
    callbacks_.end_request();
    throw;
  }
}

OpCallbacks::Request::~Request() {
  callbacks_.end_request();
}

} // namespace torch_lms
