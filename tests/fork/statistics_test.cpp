// What the environment counts, what it shows, and the waits that lock nothing.

#include <thread>

#include <c10/core/impl/SwapCounters.h>

#include "c10_harness.h"

#include "test_swap_device.h"

using c10::impl::SwapStats;
using torch_lms::EntityState;

namespace {

constexpr size_t kBytes = size_t{3} << 20;
constexpr auto kSigned = static_cast<int64_t>(kBytes);

SwapStats stats() {
  return c10::impl::SwapEnvironment::get().stats();
}

SwapStats since_now() {
  c10::impl::swap_counters().reset();
  return stats();
}

TEST(a_pageout_and_an_access_are_one_of_each) {
  OpenEnvironment env;
  const c10::Storage storage = make_storage(kBytes, 1);
  const SwapStats before = since_now();
  env.pageout_and_wait(storage);
  SwapStats now = stats();
  CHECK_EQ(now.pageouts, 1);
  CHECK_EQ(now.pageout_bytes, kSigned);
  CHECK_EQ(now.paged_out_storages, before.paged_out_storages + 1);
  CHECK_EQ(now.paged_out_bytes, before.paged_out_bytes + kSigned);
  CHECK(now.host.used_bytes >= kBytes);
  CHECK(now.host.slab_bytes >= now.host.used_bytes);
  CHECK(holds(storage, 1));
  now = stats();
  CHECK_EQ(now.pageins, 1);
  CHECK_EQ(now.pagein_bytes, kSigned);
  CHECK_EQ(now.passive_pageins, 1);
  CHECK_EQ(now.prefetch_hits, 0);
  CHECK_EQ(now.paged_out_storages, before.paged_out_storages);
  CHECK_EQ(now.paged_out_bytes, before.paged_out_bytes);
}

TEST(a_prefetch_that_arrives_is_a_hit_and_no_passive_pagein) {
  OpenEnvironment env;
  const c10::Storage storage = make_storage(kBytes, 1);
  since_now();
  env.pageout_and_wait(storage);
  env.environment.prefetch_all();
  CHECK(env.prefetch(storage));
  env.environment.wait_pending_pageins();
  CHECK(env.state(storage) == EntityState::kResident);
  CHECK(holds(storage, 1));
  const SwapStats now = stats();
  CHECK_EQ(now.prefetches, 1);
  CHECK_EQ(now.prefetch_hits, 1);
  CHECK_EQ(now.pageins, 1);
  CHECK_EQ(now.passive_pageins, 0);
}

TEST(a_prefetch_that_waits_for_its_start_is_no_hit_when_an_access_comes_first) {
  OpenEnvironment env;
  const c10::Storage storage = make_storage(kBytes, 1);
  since_now();
  env.pageout_and_wait(storage);
  env.environment.prefetch_init();
  CHECK(env.prefetch(storage));
  CHECK(holds(storage, 1));
  const SwapStats now = stats();
  CHECK_EQ(now.prefetches, 1);
  CHECK_EQ(now.prefetch_hits, 0);
  CHECK_EQ(now.pageins, 1);
  CHECK_EQ(now.passive_pageins, 1);
}

TEST(a_pageout_that_is_called_off_is_counted_as_that_alone) {
  OpenEnvironment env;
  const c10::Storage storage = make_storage(kBytes, 1);
  const SwapStats before = since_now();
  env.backend.out.shut();
  env.pageout(storage);
  env.backend.out.await_arrivals(1);
  CHECK(holds(storage, 1));
  env.backend.out.open();
  env.environment.wait_pending_pageouts();
  const SwapStats now = stats();
  CHECK_EQ(now.cancelled_pageouts, 1);
  CHECK_EQ(now.pageouts, 0);
  CHECK_EQ(now.pageins, 0);
  CHECK_EQ(now.paged_out_storages, before.paged_out_storages);
}

TEST(a_storage_that_dies_on_the_host_is_no_pagein) {
  OpenEnvironment env;
  const SwapStats before = since_now();
  env.pageout_and_wait(make_storage(kBytes, 1));
  {
    const c10::Storage storage = make_storage(kBytes, 1);
    env.pageout_and_wait(storage);
    CHECK_EQ(stats().paged_out_storages, before.paged_out_storages + 1);
  }
  const SwapStats now = stats();
  CHECK_EQ(now.pageouts, 2);
  CHECK_EQ(now.pageins, 0);
  CHECK_EQ(now.paged_out_storages, before.paged_out_storages);
  CHECK_EQ(now.paged_out_bytes, before.paged_out_bytes);
}

TEST(a_pagein_without_room_is_a_failure_each_time) {
  OpenEnvironment env;
  const c10::Storage storage = make_storage(kBytes, 1);
  env.pageout_and_wait(storage);
  since_now();
  DeviceMemory::get().set_limit(DeviceMemory::get().used() + kBytes / 2);
  CHECK_THROWS(storage.data(), OutOfDeviceMemory, "");
  env.prefetch(storage);
  env.environment.prefetch_all();
  env.environment.wait_pending_pageins(); // no failure of anybody
  CHECK_EQ(stats().pagein_failures, 2);
  CHECK_EQ(stats().pageins, 0);
  DeviceMemory::get().set_limit(SIZE_MAX);
  CHECK(holds(storage, 1));
}

TEST(everything_comes_in_and_the_environment_stays_open) {
  OpenEnvironment env;
  const c10::Storage one = make_storage(kBytes, 1);
  const c10::Storage other = make_storage(kBytes, 2);
  env.pageout(one);
  env.pageout_and_wait(other);
  env.environment.pagein_all();
  CHECK(env.state(one) == EntityState::kResident);
  CHECK(env.state(other) == EntityState::kResident);
  CHECK(env.environment.is_open());
  env.pageout_and_wait(one);
  CHECK(env.state(one) == EntityState::kPagedOut);
  CHECK(holds(one, 1));
  CHECK(holds(other, 2));
}

TEST(each_opening_has_its_number) {
  int64_t before = 0;
  {
    OpenEnvironment env;
    before = env.environment.times_opened();
  }
  OpenEnvironment env;
  CHECK_EQ(env.environment.times_opened(), before + 1);
}

TEST(others_may_page_out_while_one_waits_for_what_was_there) {
  OpenEnvironment env;
  const c10::Storage first = make_storage(kBytes, 1);
  const c10::Storage second = make_storage(kBytes, 2);
  env.backend.out.shut();
  env.pageout(first);
  env.backend.out.await_arrivals(1);
  std::thread waiter([&] { env.environment.wait_pending_pageouts(); });
  CHECK(env.pageout(second));
  env.backend.out.open();
  waiter.join();
  CHECK(env.state(first) == EntityState::kPagedOut);
  env.environment.wait_pageouts();
  CHECK(holds(first, 1));
  CHECK(holds(second, 2));
}

TEST(a_new_host_limit_holds_at_once) {
  OpenEnvironment env;
  const c10::Storage storage = make_storage(kBytes, 1);
  env.environment.set_host_limit(size_t{2} << 20);
  CHECK_EQ(stats().host.limit_bytes, size_t{2} << 20);
  env.pageout(storage);
  CHECK_THROWS(env.environment.wait_pending_pageouts(), torch_lms::HostPoolFull, "host_limit=");
  env.environment.set_host_limit(0);
  env.pageout_and_wait(storage);
  CHECK(env.state(storage) == EntityState::kPagedOut);
  CHECK(holds(storage, 1));
}

} // namespace
