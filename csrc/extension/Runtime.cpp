#include <extension/Runtime.h>

#include <exception>
#include <functional>
#include <new>

#include <entity/Error.h>

#include <extension/access/NumericState.h>
#include <extension/base/Fork.h>

namespace torch_lms {

Runtime& Runtime::get() {
  static auto* runtime = new Runtime();
  return *runtime;
}

Runtime::Runtime() {
  policy.set_feed(&callbacks);
  policy.set_listener(&planning);
  observer.set_when_idle([this] { callbacks.end_requests(); });
  static Runtime* all = this;
  ForkWatch watch{};
  watch.visit_pools = [](void (*visit)(HostPool*)) {
    all->devices.for_each([visit](Device& device) { visit(device.pool().get()); });
  };
  watch.hold_callbacks = [] { all->callbacks.hold(); };
  watch.release_callbacks = [] { all->callbacks.release(); };
  watch.put_back = &WithNumericState::put_back_in_child;
  watch_forks(watch);
}

void Runtime::enable(Device& device, size_t limit_bytes, size_t min_bytes) {
  const OpCallbacks::Request observed(callbacks);
  policy.enable(device, limit_bytes, min_bytes);
}

void Runtime::disable() {
  std::exception_ptr failed;
  const auto attempt = [&failed](const std::function<void()>& step) {
    try {
      step();
    } catch (...) { // The rest has to be undone all the same.
      failed = std::current_exception();
    }
  };
  attempt([this] {
    try {
      pager.wait_pageouts();
    } catch (const Error&) { // What did not go out is where it is to be.
    } catch (const std::bad_alloc&) {
    }
  });
  attempt([this] {
    try {
      pager.wait_pageins();
    } catch (const std::bad_alloc&) { // What did not come in comes in below.
    }
  });
  chaos.end();
  planning.disable();
  policy.disable();
  attempt([this] { pager.pagein_all(); });
  policy.track_none(); // not before: ops of other threads have to find what is still out
  callbacks.end_requests();
  if (failed != nullptr) {
    std::rethrow_exception(failed);
  }
}

} // namespace torch_lms
