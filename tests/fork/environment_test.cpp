// The environment, its queues and the storages in them, on a device whose copies wait and fail on
// demand.

#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "c10_harness.h"

#include "test_swap_device.h"

using torch_lms::EntityState;

namespace {

constexpr size_t kBytes = size_t{3} << 20;

size_t host_used_bytes() {
  return TestSwapDevice::get().pool->stats().used_bytes;
}

// --- there and back -----------------------------------------------------------------

TEST(a_pageout_frees_device_memory_and_an_access_brings_the_bytes_back) {
  OpenEnvironment env;
  const size_t before = DeviceMemory::get().used();
  const c10::Storage storage = make_storage(kBytes, 1);
  CHECK(env.pageout(storage));
  env.environment.wait_pageouts();
  CHECK(env.state(storage) == EntityState::kPagedOut);
  CHECK_EQ(DeviceMemory::get().used(), before);
  CHECK(holds(storage, 1));
  CHECK(env.state(storage) == EntityState::kResident);
  CHECK_EQ(DeviceMemory::get().used(), before + kBytes);
  CHECK_EQ(host_used_bytes(), 0U);
}

TEST(what_is_written_in_between_is_paged_out_the_next_time) {
  OpenEnvironment env;
  const c10::Storage storage = make_storage(kBytes, 1);
  for (unsigned round = 0; round < 3; ++round) {
    env.pageout_and_wait(storage);
    auto* bytes = static_cast<unsigned char*>(storage.data());
    for (size_t i = 0; i < kBytes; ++i) {
      bytes[i] = static_cast<unsigned char>(i * 31 + round);
    }
    env.pageout_and_wait(storage);
    CHECK(holds(storage, round));
  }
}

TEST(a_resident_storage_that_was_paged_out_once_pages_in_no_more) {
  OpenEnvironment env;
  const c10::Storage storage = make_storage(kBytes, 1);
  env.pageout_and_wait(storage);
  CHECK(holds(storage, 1));
  CHECK(storage.unsafeGetStorageImpl()->pager()->resident());
  void* const address = storage.data();
  CHECK_EQ(storage.data(), address);
}

TEST(a_pageout_of_what_is_out_or_empty_is_nothing) {
  OpenEnvironment env;
  const c10::Storage storage = make_storage(kBytes, 1);
  CHECK(env.pageout(storage));
  CHECK(!env.pageout(storage));
  env.environment.wait_pageouts();
  CHECK(!env.pageout(storage));
  CHECK(!env.pageout(make_storage(0, 0)));
  CHECK(holds(storage, 1));
}

TEST(swapped_storages_keep_their_bytes_in_every_state) {
  for (const bool finished : {false, true}) {
    OpenEnvironment env;
    const c10::Storage one = make_storage(kBytes, 1);
    const c10::Storage other = make_storage(kBytes, 2);
    if (!finished) {
      env.backend.out.shut();
    }
    env.pageout(one);
    finished ? env.environment.wait_pageouts() : env.backend.out.await_arrivals(1);
    std::swap(*one.unsafeGetStorageImpl(), *other.unsafeGetStorageImpl());
    env.backend.out.open();
    env.environment.wait_pageouts();
    CHECK(holds(one, 2));
    CHECK(holds(other, 1));
  }
}

TEST(new_memory_for_a_paged_out_storage_ends_what_was_paged_out) {
  OpenEnvironment env;
  const c10::Storage storage = make_storage(kBytes, 1);
  env.pageout_and_wait(storage);
  storage.set_data_ptr_noswap(DeviceMemory::get().allocate(2 * kBytes));
  storage.set_nbytes(2 * kBytes);
  CHECK_EQ(host_used_bytes(), 0U);
  std::memset(storage.data(), 7, 2 * kBytes);
  CHECK(env.pageout(storage));
  env.environment.wait_pageouts();
  CHECK_EQ(static_cast<unsigned char*>(storage.data())[2 * kBytes - 1], 7);
}

TEST(a_storage_that_shrank_in_place_is_paged_out_at_its_new_size) {
  OpenEnvironment env;
  const c10::Storage storage = make_storage(kBytes, 1);
  env.pageout_and_wait(storage);
  storage.set_nbytes(kBytes / 2);
  CHECK(holds(storage, 1));
  env.pageout_and_wait(storage);
  CHECK(host_used_bytes() < kBytes);
  CHECK(holds(storage, 1));
}

// --- called off ------------------------------------------------------------------------

TEST(a_pageout_is_tracked_from_the_moment_it_is_enqueued) {
  OpenEnvironment env;
  env.backend.out.shut();
  const c10::Storage first = make_storage(kBytes, 1);
  const c10::Storage second = make_storage(kBytes, 2);
  void* const addresses[] = {first.data(), second.data()};
  env.pageout(first);
  env.backend.out.await_arrivals(1);
  env.pageout(second);
  CHECK(env.state(first) == EntityState::kPagingOut);
  CHECK(env.state(second) == EntityState::kOutQueued);
  // An access calls either off: no copy is needed, the memory is where it was.
  CHECK(first.data() == addresses[0]);
  CHECK(second.data() == addresses[1]);
  std::memset(first.data(), 0, kBytes);
  env.backend.out.open();
  env.environment.wait_pageouts();
  CHECK(env.state(first) == EntityState::kResident);
  CHECK_EQ(static_cast<unsigned char*>(first.data())[5], 0);
  CHECK(holds(second, 2));
  CHECK_EQ(host_used_bytes(), 0U);
}

TEST(a_pageout_that_was_called_off_can_be_asked_for_again_at_once) {
  OpenEnvironment env;
  env.backend.out.shut();
  const c10::Storage storage = make_storage(kBytes, 1);
  env.pageout(storage);
  env.backend.out.await_arrivals(1);
  CHECK(holds(storage, 1));
  CHECK(env.pageout(storage));
  env.backend.out.open();
  env.environment.wait_pageouts();
  CHECK(env.state(storage) == EntityState::kPagedOut);
  CHECK(holds(storage, 1));
}

TEST(queues_keep_no_storage_alive) {
  OpenEnvironment env;
  env.backend.out.shut();
  const size_t before = DeviceMemory::get().used();
  {
    const c10::Storage copying = make_storage(kBytes, 1);
    const c10::Storage queued = make_storage(kBytes, 2);
    env.pageout(copying);
    env.backend.out.await_arrivals(1);
    env.pageout(queued);
  }
  CHECK_EQ(DeviceMemory::get().used(), before);
  env.backend.out.open();
  env.environment.wait_pageouts();
  CHECK_EQ(host_used_bytes(), 0U);
}

TEST(a_storage_that_dies_on_the_host_gives_its_host_memory_back) {
  OpenEnvironment env;
  {
    const c10::Storage storage = make_storage(kBytes, 1);
    env.pageout_and_wait(storage);
    CHECK(host_used_bytes() >= kBytes);
  }
  CHECK_EQ(host_used_bytes(), 0U);
}

TEST(a_storage_that_dies_while_it_comes_back_leaves_nothing) {
  OpenEnvironment env;
  const size_t before = DeviceMemory::get().used();
  env.backend.in.shut();
  std::thread opener;
  {
    const c10::Storage coming = make_storage(kBytes, 1);
    const c10::Storage queued = make_storage(kBytes, 2);
    env.pageout(coming);
    env.pageout_and_wait(queued);
    env.environment.prefetch_all();
    env.prefetch(coming);
    env.backend.in.await_arrivals(1);
    env.prefetch(queued);
    opener = std::thread([&] { env.backend.in.open(); });
  }
  opener.join();
  env.environment.prefetch_init();
  CHECK_EQ(DeviceMemory::get().used(), before);
  CHECK_EQ(host_used_bytes(), 0U);
}

// --- page-ins ------------------------------------------------------------------------------

TEST(prefetches_wait_for_prefetch_all) {
  OpenEnvironment env;
  const c10::Storage storage = make_storage(kBytes, 1);
  env.pageout_and_wait(storage);
  env.environment.prefetch_init();
  CHECK(env.prefetch(storage));
  CHECK(!env.prefetch(storage));
  CHECK(env.state(storage) == EntityState::kInQueued);
  env.environment.prefetch_all();
  env.environment.prefetch_init(); // waits for those under way
  CHECK(env.state(storage) == EntityState::kResident);
  CHECK(storage.unsafeGetStorageImpl()->data_ptr_without_pagein().get() == nullptr);
  CHECK(holds(storage, 1));
}

TEST(a_passive_pagein_passes_all_prefetches_that_have_not_begun) {
  OpenEnvironment env;
  std::vector<c10::Storage> storages = env.paging_out(4, kBytes);
  env.environment.wait_pageouts();
  env.backend.in.shut();
  env.environment.prefetch_all();
  env.prefetch(storages[0]);
  env.backend.in.await_arrivals(1);
  env.prefetch(storages[1]);
  env.prefetch(storages[2]);
  CHECK(holds(storages[3], 3)); // never asked for
  CHECK(holds(storages[2], 2)); // at the tail
  CHECK(env.state(storages[0]) == EntityState::kPagingIn);
  CHECK(env.state(storages[1]) == EntityState::kInQueued);
  env.backend.in.open();
  env.environment.prefetch_init();
  CHECK(env.state(storages[1]) == EntityState::kResident);
  CHECK(holds(storages[0], 0));
  CHECK(holds(storages[1], 1));
}

TEST(a_passive_pagein_needs_no_running_queue) {
  OpenEnvironment env;
  const c10::Storage queued = make_storage(kBytes, 1);
  const c10::Storage other = make_storage(kBytes, 2);
  env.pageout(queued);
  env.pageout_and_wait(other);
  env.environment.prefetch_init();
  env.prefetch(queued);
  CHECK(holds(other, 2));
  CHECK(holds(queued, 1));
}

TEST(a_prefetch_of_what_is_on_its_way_out_calls_that_off) {
  OpenEnvironment env;
  env.backend.out.shut();
  const c10::Storage storage = make_storage(kBytes, 1);
  env.pageout(storage);
  env.backend.out.await_arrivals(1);
  CHECK(!env.prefetch(storage));
  CHECK(env.state(storage) == EntityState::kResident);
  CHECK(holds(storage, 1));
}

TEST(a_pageout_of_what_waits_for_its_prefetch_calls_that_off) {
  OpenEnvironment env;
  const c10::Storage storage = make_storage(kBytes, 1);
  env.pageout_and_wait(storage);
  env.prefetch(storage);
  CHECK(!env.pageout(storage));
  CHECK(env.state(storage) == EntityState::kPagedOut);
  CHECK(holds(storage, 1));
}

TEST(what_a_prefetch_has_brought_can_go_out_again_unused) {
  OpenEnvironment env;
  const c10::Storage storage = make_storage(kBytes, 1);
  env.pageout_and_wait(storage);
  env.prefetch(storage);
  env.environment.prefetch_all();
  env.environment.prefetch_init();
  CHECK(env.pageout(storage));
  env.environment.wait_pageouts();
  CHECK(env.state(storage) == EntityState::kPagedOut);
  CHECK(holds(storage, 1));
}

// --- open and close ------------------------------------------------------------------------------

TEST(nothing_works_without_an_environment) {
  static_cast<void>(test_device_registered());
  auto& environment = c10::impl::SwapEnvironment::get();
  const c10::Storage storage = make_storage(kBytes, 1);
  c10::StorageImpl& impl = *storage.unsafeGetStorageImpl();
  CHECK_THROWS(environment.pageout(impl), torch_lms::Error, "create_swap_env");
  CHECK_THROWS(environment.prefetch(impl), torch_lms::Error, "create_swap_env");
  CHECK_THROWS(environment.prefetch_init(), torch_lms::Error, "create_swap_env");
  CHECK_THROWS(environment.prefetch_all(), torch_lms::Error, "create_swap_env");
  CHECK_THROWS(environment.wait_pageouts(), torch_lms::Error, "create_swap_env");
  CHECK_THROWS(environment.close(), torch_lms::Error, "create_swap_env");
}

TEST(one_environment_is_open_at_a_time) {
  OpenEnvironment env;
  CHECK_THROWS(env.environment.open(0), torch_lms::Error, "close_swap_env");
  CHECK(env.environment.is_open());
}

TEST(closing_with_work_in_flight_waits_for_it_and_pages_everything_in) {
  OpenEnvironment env;
  const c10::Storage out = make_storage(kBytes, 1);
  const c10::Storage away = make_storage(kBytes, 2);
  const c10::Storage held = make_storage(kBytes, 3);
  env.pageout(away);
  env.pageout_and_wait(held);
  env.environment.prefetch_init();
  env.prefetch(held); // prefetch_all is never called
  env.backend.out.shut();
  env.pageout(out);
  env.backend.out.await_arrivals(3);
  std::thread opener([&] { env.backend.out.open(); });
  env.environment.close();
  opener.join();
  CHECK(!env.environment.is_open());
  for (const auto& entry : {std::make_pair(&out, 1U), {&away, 2U}, {&held, 3U}}) {
    CHECK(env.state(*entry.first) == EntityState::kResident);
    CHECK(holds(*entry.first, entry.second));
  }
  CHECK_EQ(host_used_bytes(), 0U);
}

TEST(closing_without_room_raises_and_the_storages_stay_usable) {
  const c10::Storage storage = make_storage(kBytes, 1);
  {
    OpenEnvironment env;
    env.pageout_and_wait(storage);
    DeviceMemory::get().set_limit(DeviceMemory::get().used() + kBytes / 2);
    CHECK_THROWS(env.environment.close(), OutOfDeviceMemory, "");
    CHECK(!env.environment.is_open());
  }
  CHECK(holds(storage, 1));
}

TEST(an_environment_can_be_opened_again) {
  const c10::Storage storage = make_storage(kBytes, 1);
  for (int round = 0; round < 3; ++round) {
    OpenEnvironment env;
    env.pageout_and_wait(storage);
    CHECK(env.state(storage) == EntityState::kPagedOut);
    env.environment.prefetch_init();
    env.prefetch(storage);
    env.environment.prefetch_all();
    CHECK(holds(storage, 1));
  }
}

} // namespace
