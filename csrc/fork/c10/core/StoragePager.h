#pragma once

#include <atomic>
#include <memory>

#include <c10/core/Allocator.h>
#include <c10/macros/Macros.h>

namespace c10 {

/// Keeps the memory of a storage elsewhere, and brings it back on access.
///
/// A `StorageImpl` without one pays one predictable branch an access, one with a
/// pager whose storage is resident a call and one more load.
///
/// Note [A pager knows no storage]
/// `std::swap(*storage, *other)` moves a pager to another `StorageImpl`, and storages die
/// while copies are under way. So a pager takes a storage's memory over when it is asked to
/// move it and puts it back on access: it is given the storage's `DataPtr` then, and keeps
/// no pointer to the storage. Whoever copies sees the pager's memory alone.
class C10_API StoragePager {
 public:
  StoragePager() = default;
  StoragePager(const StoragePager&) = delete;
  StoragePager& operator=(const StoragePager&) = delete;

  /// The storage dies, or gets other memory: whatever the pager holds is given back.
  virtual ~StoragePager();

  /// Whether the storage holds its memory and any thread may use it. Thread-safe.
  bool resident() const noexcept {
    return resident_.load(std::memory_order_acquire);
  }

  /// Makes `data`, the storage's memory, valid for the calling thread. Throws what the
  /// device allocator throws; nothing is lost then and the next access tries again.
  /// Thread-safe.
  virtual void pagein(DataPtr& data) = 0;

 protected:
  void set_resident(bool resident) noexcept {
    resident_.store(resident, std::memory_order_release);
  }

 private:
  std::atomic<bool> resident_{true};
};

/// A storage's pager, or none. Once installed it lives until the storage drops it, so an
/// access does not race with the end of its pager; as elsewhere in a storage, a mutator
/// beside an access of another thread does.
class C10_API StoragePagerSlot {
 public:
  StoragePagerSlot() = default;
  StoragePagerSlot(StoragePagerSlot&& other) noexcept : pager_(other.release()) {}
  StoragePagerSlot& operator=(StoragePagerSlot&& other) noexcept;
  ~StoragePagerSlot() {
    drop();
  }

  bool empty() const noexcept {
    return pager_.load(std::memory_order_relaxed) == nullptr;
  }
  StoragePager* get() const noexcept {
    return pager_.load(std::memory_order_acquire);
  }

  /// Installs a pager where there is none. Returns the one that is there afterwards.
  StoragePager* install(std::unique_ptr<StoragePager> pager) noexcept;

  void drop() noexcept {
    if (C10_UNLIKELY(!empty())) {
      drop_slow();
    }
  }

 private:
  StoragePager* release() noexcept {
    return pager_.exchange(nullptr, std::memory_order_acq_rel);
  }
  void drop_slow() noexcept;

  std::atomic<StoragePager*> pager_{nullptr};
};

} // namespace c10
