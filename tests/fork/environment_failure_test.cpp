// What the environment does when memory or a copy is missing, and what it refuses.

#include "c10_harness.h"

#include "test_swap_device.h"

using torch_lms::EntityState;

namespace {

constexpr size_t kBytes = size_t{3} << 20;

TEST(no_room_for_a_pagein_raises_at_the_access_and_loses_nothing) {
  OpenEnvironment env;
  const c10::Storage storage = make_storage(kBytes, 1);
  env.pageout_and_wait(storage);
  DeviceMemory::get().set_limit(DeviceMemory::get().used() + kBytes / 2);
  CHECK_THROWS(storage.data(), OutOfDeviceMemory, "out of device memory");
  CHECK_THROWS(storage.data_ptr(), OutOfDeviceMemory, "out of device memory");
  CHECK(env.state(storage) == EntityState::kPagedOut);
  DeviceMemory::get().set_limit(SIZE_MAX);
  CHECK(holds(storage, 1));
}

TEST(a_prefetch_without_room_is_no_error) {
  OpenEnvironment env;
  const c10::Storage storage = make_storage(kBytes, 1);
  env.pageout_and_wait(storage);
  DeviceMemory::get().set_limit(DeviceMemory::get().used() + kBytes / 2);
  env.prefetch(storage);
  env.environment.prefetch_all();
  env.environment.prefetch_init();
  CHECK(env.state(storage) == EntityState::kPagedOut);
  CHECK_THROWS(storage.data(), OutOfDeviceMemory, "");
  DeviceMemory::get().set_limit(SIZE_MAX);
  CHECK(holds(storage, 1));
}

TEST(no_room_on_the_host_raises_at_the_wait_and_leaves_the_storage_where_it_is) {
  OpenEnvironment env(size_t{2} << 20);
  const c10::Storage storage = make_storage(kBytes, 1);
  env.pageout(storage);
  CHECK_THROWS(env.environment.wait_pageouts(), torch_lms::HostPoolFull, "host_limit=");
  CHECK(env.state(storage) == EntityState::kResident);
  CHECK(holds(storage, 1));
  CHECK(storage.unsafeGetStorageImpl()->pager()->resident());
}

TEST(a_failed_copy_raises_at_the_wait_and_leaves_the_storage_where_it_is) {
  OpenEnvironment env;
  const c10::Storage storage = make_storage(kBytes, 1);
  env.backend.failing = true;
  env.pageout(storage);
  CHECK_THROWS(env.environment.wait_pageouts(), torch_lms::TransferFailed, "the copy failed");
  CHECK(holds(storage, 1));
  env.backend.failing = false;
  env.pageout_and_wait(storage);
  CHECK(env.state(storage) == EntityState::kPagedOut);
}

TEST(foreign_memory_is_refused) {
  OpenEnvironment env;
  char bytes[16] = {};
  const c10::Storage storage(
      c10::Storage::use_byte_size_t(),
      sizeof(bytes),
      c10::DataPtr(bytes, c10::kCPU),
      nullptr,
      false);
  CHECK_THROWS(env.pageout(storage), torch_lms::PageoutRefused, "does not belong to PyTorch's");
  CHECK(storage.unsafeGetStorageImpl()->pager() == nullptr);
  CHECK_EQ(storage.data(), static_cast<void*>(bytes));
}

TEST(a_device_without_paging_is_refused) {
  OpenEnvironment env;
  char bytes[16] = {};
  const c10::Storage storage(
      c10::Storage::use_byte_size_t(),
      sizeof(bytes),
      c10::DataPtr(bytes, c10::kMeta),
      nullptr,
      false);
  CHECK_THROWS(env.pageout(storage), torch_lms::PageoutRefused, "found one on meta");
}

TEST(nothing_moves_while_a_graph_is_captured) {
  OpenEnvironment env;
  const c10::Storage resident = make_storage(kBytes, 1);
  const c10::Storage away = make_storage(kBytes, 2);
  env.pageout_and_wait(away);
  TestSwapDevice::get().captures = true;
  CHECK_THROWS(env.pageout(resident), torch_lms::PageoutRefused, "capture of a CUDA graph");
  CHECK_THROWS(env.prefetch(away), torch_lms::PageoutRefused, "capture of a CUDA graph");
  CHECK_THROWS(away.data(), torch_lms::PageoutRefused, "capture of a CUDA graph");
  CHECK(holds(resident, 1));
  TestSwapDevice::get().captures = false;
  CHECK(holds(away, 2));
  CHECK(env.pageout(resident));
}

} // namespace
