// The CPU's own device, which TORCH_SWAP_CPU=1 turns on when the library is loaded.

#include <cstdlib>
#include <cstring>
#include <memory>

#include "c10_harness.h"

#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/Error.h>
#include <c10/core/impl/SwapEnvironment.h>

#include "baton.h"

namespace {

constexpr size_t kBytes = size_t{1} << 20;

c10::impl::SwapEnvironment& environment() {
  return c10::impl::SwapEnvironment::get();
}

struct OpenEnvironment {
  OpenEnvironment() {
    environment().open(0);
  }
  ~OpenEnvironment() {
    environment().close();
  }
};

void need_flag() {
  if (std::getenv("TORCH_SWAP_CPU") == nullptr) {
    SKIP("needs TORCH_SWAP_CPU=1");
  }
}

TEST(main_memory_pages_out_to_a_file_and_back) {
  need_flag();
  OpenEnvironment open;
  const c10::Storage storage(
      c10::Storage::use_byte_size_t(), kBytes, c10::GetCPUAllocator(), /*resizable=*/true);
  std::memset(storage.data(), 42, kBytes);
  c10::StorageImpl& impl = *storage.unsafeGetStorageImpl();
  CHECK(environment().pageout(impl));
  environment().wait_pageouts();
  CHECK(environment().state(impl) == torch_lms::EntityState::kPagedOut);
  CHECK_EQ(static_cast<const char*>(storage.data())[kBytes - 1], 42);
}

// Its host memory is of files, which processes share.
TEST(a_child_keeps_what_was_out_when_it_was_forked) {
  need_flag();
  OpenEnvironment open;
  const auto make = [](int value) {
    c10::Storage storage(
        c10::Storage::use_byte_size_t(), kBytes, c10::GetCPUAllocator(), /*resizable=*/true);
    std::memset(storage.data(), value, kBytes);
    return storage;
  };
  const c10::Storage first = make(1);
  const c10::Storage second = make(2);
  environment().pageout(*first.unsafeGetStorageImpl());
  environment().wait_pageouts();
  Baton reused;
  const pid_t child = harness::start_child([&] {
    reused.await();
    const auto* bytes = static_cast<const char*>(first.data());
    CHECK(bytes[0] == 1 && std::memcmp(bytes, bytes + 1, kBytes - 1) == 0);
  });
  first.data();
  environment().pageout(*second.unsafeGetStorageImpl()); // to the same place of the file
  environment().wait_pageouts();
  reused.pass();
  CHECK(harness::child_passed(child));
}

TEST(a_storage_with_a_cpp_object_is_refused) {
  need_flag();
  OpenEnvironment open;
  auto* object = new std::string("a handle of the profiler, a packed weight");
  const auto destroy = [](void* data) { delete static_cast<std::string*>(data); };
  const c10::Storage storage(
      c10::Storage::use_byte_size_t(),
      sizeof(std::string),
      c10::DataPtr(object, object, destroy, c10::kCPU),
      nullptr,
      false);
  CHECK_THROWS(
      environment().pageout(*storage.unsafeGetStorageImpl()),
      torch_lms::PageoutRefused,
      "a C++ object");
}

} // namespace
