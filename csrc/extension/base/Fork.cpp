#include <extension/base/Fork.h>

#include <pthread.h>

#include <algorithm>
#include <array>
#include <mutex>

#include <entity/HostPool.h>
#include <entity/OpClock.h>

namespace torch_lms {
namespace {

// Devices may share a pool, and may come while another thread forks.
std::mutex fork_mutex; // held from `before` to `in_parent` or `in_child`
std::array<HostPool*, 8> prepared{};
size_t prepared_count = 0;

ForkWatch watched{};

void prepare(HostPool* pool) {
  const auto end = prepared.begin() + prepared_count;
  if (std::find(prepared.begin(), end, pool) == end && prepared_count < prepared.size()) {
    pool->prepare_fork();
    prepared[prepared_count++] = pool;
  }
}

void before() {
  fork_mutex.lock();
  watched.hold_callbacks(); // the order of the locks
  watched.visit_pools(&prepare);
}

void in_parent() {
  while (prepared_count != 0) {
    prepared[--prepared_count]->after_fork_in_parent();
  }
  watched.release_callbacks();
  fork_mutex.unlock();
}

void in_child() {
  forked.store(true);
  // The parent may reuse the host memory of storages that the child still has:
  // the child gets a copy of its own at the same addresses.
  while (prepared_count != 0) {
    prepared[--prepared_count]->reclone_after_fork();
  }
  watched.put_back();
  watched.release_callbacks();
  fork_mutex.unlock();
}

} // namespace

void watch_forks(const ForkWatch& watch) {
  watched = watch;
  OpClock::watch_forks(); // the order of the locks
  static const int registered = pthread_atfork(&before, &in_parent, &in_child);
  static_cast<void>(registered);
}

} // namespace torch_lms
