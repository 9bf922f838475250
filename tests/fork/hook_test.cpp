// Every way to the memory of a storage, with a pager that is made of plain counters.

#include <cstring>
#include <functional>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "c10_harness.h"

#include <c10/core/CPUAllocator.h>
#include <c10/core/CopyBytes.h>
#include <c10/core/Storage.h>
#include <c10/core/StoragePager.h>

// PyTorch registers this beside its tensors' copies, which are not here.
namespace c10 {
REGISTER_COPY_BYTES_FUNCTION(
    DeviceType::CPU,
    DeviceType::CPU,
    [](size_t nbytes, const void* from, Device, void* to, Device) {
      std::memcpy(to, from, nbytes);
    });
} // namespace c10

namespace {

constexpr size_t kBytes = 64;

/// What has happened to a pager.
struct Events {
  int pageins = 0;
  int drops = 0;
};

/// Holds a storage's memory until it is accessed.
class FakePager final : public c10::StoragePager {
 public:
  FakePager(Events& events, c10::DataPtr& data) : events_(events), away_(std::move(data)) {
    data = c10::DataPtr(nullptr, away_.device());
    set_resident(false);
  }
  ~FakePager() override {
    ++events_.drops;
  }
  void pagein(c10::DataPtr& data) override {
    if (fail_) {
      throw std::runtime_error("no room");
    }
    ++events_.pageins;
    data = std::move(away_);
    set_resident(true);
  }
  void set_failing(bool failing) {
    fail_ = failing;
  }

 private:
  Events& events_;
  c10::DataPtr away_;
  bool fail_ = false;
};

/// A storage whose bytes are 0, 1, 2…, paged out.
struct PagedOut {
  c10::Storage storage;
  c10::StorageImpl& impl;
  void* address;
  Events events;
  FakePager* pager;

  PagedOut()
      : storage(
            c10::Storage::use_byte_size_t(),
            kBytes,
            c10::GetCPUAllocator(),
            /*resizable=*/true),
        impl(*storage.unsafeGetStorageImpl()),
        address(impl.data()) {
    for (size_t i = 0; i < kBytes; ++i) {
      static_cast<unsigned char*>(address)[i] = static_cast<unsigned char>(i);
    }
    auto made = std::make_unique<FakePager>(events, impl.data_ptr_without_pagein());
    pager = made.get();
    impl.install_pager(std::move(made));
  }
};

struct Access {
  const char* name;
  std::function<const void*(PagedOut&)> read;
};

caffe2::TypeMeta bytes_meta() {
  return caffe2::TypeMeta::Make<uint8_t>();
}

c10::intrusive_ptr<c10::TensorImpl> tensor_of(const c10::Storage& storage) {
  auto tensor = c10::make_intrusive<c10::TensorImpl>(
      c10::Storage(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), bytes_meta());
  tensor->set_sizes_contiguous({kBytes});
  return tensor;
}

const std::vector<Access>& accesses() {
  static const std::vector<Access> all = {
      {"StorageImpl::data()", [](PagedOut& p) { return p.impl.data(); }},
      {"StorageImpl::data() const",
       [](PagedOut& p) { return const_cast<const c10::StorageImpl&>(p.impl).data(); }},
      {"StorageImpl::data<T>()", [](PagedOut& p) { return p.impl.data<uint8_t>(); }},
      {"StorageImpl::unsafe_data<T>()", [](PagedOut& p) { return p.impl.unsafe_data<uint8_t>(); }},
      {"StorageImpl::data_ptr()", [](PagedOut& p) { return p.impl.data_ptr().get(); }},
      {"StorageImpl::data_ptr() const",
       [](PagedOut& p) { return const_cast<const c10::StorageImpl&>(p.impl).data_ptr().get(); }},
      {"Storage::data()", [](PagedOut& p) { return p.storage.data(); }},
      {"Storage::data<T>()", [](PagedOut& p) { return p.storage.data<uint8_t>(); }},
      {"Storage::unsafe_data<T>()", [](PagedOut& p) { return p.storage.unsafe_data<uint8_t>(); }},
      {"Storage::data_ptr()", [](PagedOut& p) { return p.storage.data_ptr().get(); }},
      {"Storage::data_ptr() const",
       [](PagedOut& p) { return const_cast<const c10::Storage&>(p.storage).data_ptr().get(); }},
      {"TensorImpl::data()", [](PagedOut& p) { return tensor_of(p.storage)->data(); }},
      {"TensorImpl::data<T>()", [](PagedOut& p) { return tensor_of(p.storage)->data<uint8_t>(); }},
      {"TensorImpl::data_ptr_impl<T>()",
       [](PagedOut& p) { return tensor_of(p.storage)->data_ptr_impl<uint8_t>(); }},
      {"TensorImpl::unsafe_data<T>()",
       [](PagedOut& p) { return tensor_of(p.storage)->unsafe_data<uint8_t>(); }},
      {"a view's data",
       [](PagedOut& p) {
         auto view = tensor_of(p.storage);
         view->set_sizes_contiguous({kBytes - 8});
         view->set_storage_offset(8);
         return static_cast<const void*>(static_cast<const uint8_t*>(view->data()) - 8);
       }},
      {"a deleter's context, as record_stream and IPC look for it",
       [](PagedOut& p) { return p.impl.data_ptr().get_context(); }},
  };
  return all;
}

TEST(every_access_brings_the_bytes_back_once) {
  for (const Access& access : accesses()) {
    PagedOut paged;
    CHECK_EQ(paged.impl.data_ptr_without_pagein().get(), static_cast<void*>(nullptr));
    const void* found = access.read(paged);
    if (!CHECK_EQ(found, static_cast<const void*>(paged.address))) {
      std::fprintf(stderr, "  by %s\n", access.name);
    }
    CHECK_EQ(paged.events.pageins, 1);
    access.read(paged);
    CHECK_EQ(paged.events.pageins, 1);
    CHECK_EQ(paged.events.drops, 0);
    CHECK_EQ(static_cast<const unsigned char*>(paged.impl.data())[kBytes - 1], kBytes - 1);
  }
}

TEST(a_failed_pagein_raises_at_every_access_and_can_be_repeated) {
  for (const Access& access : accesses()) {
    PagedOut paged;
    paged.pager->set_failing(true);
    CHECK_THROWS(access.read(paged), std::runtime_error, "no room");
    CHECK_THROWS(access.read(paged), std::runtime_error, "no room");
    paged.pager->set_failing(false);
    CHECK_EQ(access.read(paged), static_cast<const void*>(paged.address));
  }
}

TEST(what_needs_no_memory_leaves_it_away) {
  PagedOut paged;
  const c10::Storage alias = paged.storage;
  CHECK_EQ(paged.impl.nbytes(), kBytes);
  CHECK(paged.impl.device() == c10::Device(c10::kCPU));
  CHECK(paged.impl.device_type() == c10::kCPU);
  CHECK(paged.impl.resizable());
  CHECK(paged.impl.allocator() == c10::GetCPUAllocator());
  CHECK(paged.storage.is_alias_of(alias));
  CHECK_EQ(paged.storage.use_count(), 2U);
  CHECK(tensor_of(paged.storage)->has_storage());
  CHECK_EQ(paged.events.pageins, 0);
}

TEST(the_device_of_a_paged_out_storage_stays_its_own) {
  Events events;
  const c10::Device cuda(c10::kCUDA, 3);
  c10::StorageImpl storage(
      c10::StorageImpl::use_byte_size_t(), kBytes, c10::DataPtr(&events, cuda), nullptr, false);
  storage.install_pager(std::make_unique<FakePager>(events, storage.data_ptr_without_pagein()));
  CHECK(storage.device() == cuda);
  CHECK(storage.device_type() == c10::kCUDA);
  CHECK_EQ(storage.data(), static_cast<void*>(&events));
}

TEST(set_data_ptr_returns_what_has_been_paged_in) {
  PagedOut paged;
  c10::DataPtr old = paged.impl.set_data_ptr(c10::GetCPUAllocator()->allocate(kBytes));
  CHECK_EQ(old.get(), paged.address);
  CHECK_EQ(paged.events.pageins, 1);
  CHECK_EQ(paged.events.drops, 1);
  CHECK(paged.impl.pager() == nullptr);
}

TEST(set_data_ptr_that_finds_no_room_changes_nothing) {
  PagedOut paged;
  paged.pager->set_failing(true);
  CHECK_THROWS(
      paged.impl.set_data_ptr(c10::GetCPUAllocator()->allocate(kBytes)),
      std::runtime_error,
      "no room");
  paged.pager->set_failing(false);
  CHECK_EQ(paged.impl.data(), paged.address);
}

TEST(mutators_that_forget_the_memory_drop_the_pager_without_a_pagein) {
  char other[kBytes];
  const std::vector<std::pair<const char*, std::function<void(c10::StorageImpl&)>>> mutators = {
      {"set_data_ptr_noswap",
       [&](c10::StorageImpl& s) { s.set_data_ptr_noswap(c10::DataPtr(other, c10::kCPU)); }},
      {"reset", [](c10::StorageImpl& s) { s.reset(); }},
      {"release_resources", [](c10::StorageImpl& s) { s.release_resources(); }},
      {"UniqueStorageShareExternalPointer(void*)",
       [&](c10::StorageImpl& s) { s.UniqueStorageShareExternalPointer(other, kBytes); }},
      {"UniqueStorageShareExternalPointer(DataPtr)",
       [&](c10::StorageImpl& s) {
         s.UniqueStorageShareExternalPointer(c10::DataPtr(other, c10::kCPU), kBytes);
       }},
  };
  for (const auto& mutator : mutators) {
    PagedOut paged;
    mutator.second(paged.impl);
    if (!CHECK_EQ(paged.events.drops, 1) || !CHECK_EQ(paged.events.pageins, 0)) {
      std::fprintf(stderr, "  by %s\n", mutator.first);
    }
    CHECK(paged.impl.pager() == nullptr);
    CHECK(paged.impl.data() == nullptr || paged.impl.data() == other);
    CHECK(paged.impl.device() == c10::Device(c10::kCPU));
  }
}

TEST(a_swap_of_two_storages_takes_the_pager_along) {
  PagedOut paged;
  c10::Storage other(
      c10::Storage::use_byte_size_t(), kBytes, c10::GetCPUAllocator(), /*resizable=*/true);
  void* const others = other.data();
  std::swap(paged.impl, *other.unsafeGetStorageImpl());
  CHECK_EQ(paged.events.pageins, 0);
  CHECK_EQ(paged.events.drops, 0);
  CHECK(paged.impl.pager() == nullptr);
  CHECK_EQ(paged.impl.data(), others);
  CHECK_EQ(other.data(), paged.address);
  CHECK_EQ(paged.events.pageins, 1);
}

TEST(a_move_takes_the_pager_along) {
  PagedOut paged;
  c10::StorageImpl moved(std::move(paged.impl));
  CHECK(paged.impl.pager() == nullptr);
  CHECK_EQ(moved.data(), paged.address);
  CHECK_EQ(paged.events.drops, 0);
}

TEST(an_assignment_drops_the_pager_of_what_is_overwritten) {
  PagedOut paged;
  PagedOut other;
  paged.impl = std::move(other.impl);
  CHECK_EQ(paged.events.drops, 1);
  CHECK_EQ(other.events.drops, 0);
  CHECK_EQ(paged.impl.data(), other.address);
}

TEST(a_storage_that_dies_takes_its_pager_with_it) {
  Events events;
  {
    PagedOut paged;
    CHECK_EQ(paged.events.drops, 0);
    events = paged.events;
    c10::weak_intrusive_ptr<c10::StorageImpl> weak(
        c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(&paged.impl));
    paged.storage = c10::Storage();
    // Weak references keep the object, not its memory.
    CHECK_EQ(paged.events.drops, 1);
    CHECK_EQ(paged.events.pageins, 0);
  }
}

TEST(the_pager_dies_before_the_memory) {
  static bool memory_alive = false;
  static bool alive_at_drop = false;
  class Watching final : public c10::StoragePager {
   public:
    ~Watching() override {
      alive_at_drop = memory_alive;
    }
    void pagein(c10::DataPtr&) override {}
  };
  memory_alive = true;
  {
    c10::StorageImpl storage(
        c10::StorageImpl::use_byte_size_t(),
        kBytes,
        c10::DataPtr(
            &memory_alive, &memory_alive, [](void*) { memory_alive = false; }, c10::kCPU),
        nullptr,
        false);
    storage.install_pager(std::make_unique<Watching>());
  }
  CHECK(alive_at_drop);
  CHECK(!memory_alive);
}

TEST(of_two_pagers_the_first_stays) {
  PagedOut paged;
  Events events;
  c10::DataPtr none;
  const auto* present = paged.impl.install_pager(std::make_unique<FakePager>(events, none));
  CHECK(present == paged.pager);
  CHECK_EQ(events.drops, 1);
  CHECK_EQ(paged.events.drops, 0);
}

TEST(extend_keeps_the_bytes_of_a_paged_out_tensor) {
  PagedOut paged;
  auto tensor = tensor_of(paged.storage);
  tensor->Extend(16, 50.F);
  CHECK_EQ(tensor->numel(), static_cast<int64_t>(kBytes) + 16);
  const auto* bytes = tensor->data<uint8_t>();
  for (size_t i = 0; i < kBytes; ++i) {
    CHECK_EQ(bytes[i], i);
  }
  CHECK_EQ(paged.events.pageins, 1);
}

TEST(free_memory_gives_a_paged_out_tensor_up) {
  PagedOut paged;
  auto tensor = tensor_of(paged.storage);
  paged.storage = c10::Storage();
  tensor->FreeMemory();
  CHECK_EQ(paged.events.drops, 1);
}

TEST(a_storage_grows_by_one_pointer) {
  // 80 in a release of either version; 1.13 has one more word for symbolic sizes' flag.
  struct Before : c10::intrusive_ptr_target {
    c10::DataPtr data;
    decltype(std::declval<c10::StorageImpl&>().nbytes()) nbytes;
    bool flags[2];
    c10::Allocator* allocator;
  };
  CHECK_EQ(sizeof(c10::StoragePagerSlot), sizeof(void*));
  CHECK_EQ(sizeof(c10::StorageImpl), sizeof(Before) + sizeof(void*));
}

} // namespace
