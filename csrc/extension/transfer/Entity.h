#pragma once

#include <atomic>
#include <memory>
#include <utility>

#include <entity/EntityStorageImpl.h>

#include <extension/memory/Device.h>
#include <extension/trace/Uses.h>

namespace torch_lms {

/// Whether a page-out is asked for, or under way: the bytes are on the device.
inline bool is_leaving(EntityState state) noexcept {
  return state == EntityState::kOutQueued || state == EntityState::kPagingOut;
}

/// Whether a page-in is asked for, or under way.
inline bool is_arriving(EntityState state) noexcept {
  return state == EntityState::kInQueued || state == EntityState::kPagingIn;
}

/// The bytes behind a `c10::StorageImpl`, with the device they belong to and when they were
/// used.
class Entity final : public EntityStorageImpl {
 public:
  Entity(
      std::unique_ptr<StorageBinding> binding,
      const c10::StorageImpl& storage,
      Device& device,
      size_t nbytes,
      uint64_t first_seen)
      : EntityStorageImpl(std::move(binding), device.backend(), nbytes, first_seen),
        device_(device),
        storage_(&storage) {}

  /// Whether it is this storage's: its address is no other's while the entity lives. Thread-safe.
  bool binds(const c10::StorageImpl& storage) const noexcept {
    return storage_ == &storage;
  }

  /// Its storage, which may have died: then nothing is left of it but what tells so. Thread-safe.
  const c10::StorageImpl& storage() const noexcept {
    return *storage_;
  }

  /// Whether it is this storage's, and the storage still holds the bytes that the entity stands
  /// for: an op or the program may have resized it (Note [Storages that change their memory]). The
  /// caller holds the storage. Thread-safe.
  bool stands_for(const c10::StorageImpl& storage) const noexcept {
    return binds(storage) && stands_for(size_t(storage.sym_nbytes().as_int_unchecked()));
  }
  /// The same of its storage, which holds so many bytes.
  bool stands_for(size_t storage_bytes) const noexcept {
    return !replaced() && (storage_bytes == nbytes() || state() != EntityState::kResident);
  }

  /// Thread-safe.
  Device& device() const noexcept {
    return device_;
  }

  /// Pinned for good, or until `unfix`: by the program, a captured graph or a collective. (What
  /// an op pins, it lets go of by itself.) Thread-safe.
  void fix() noexcept {
    pin();
    fixed_.fetch_add(1, std::memory_order_acq_rel);
  }
  void unfix() noexcept {
    fixed_.fetch_sub(1, std::memory_order_acq_rel);
    unpin();
  }
  bool fixed() const noexcept {
    return fixed_.load(std::memory_order_acquire) > 0;
  }

  /// Whether ops hold plain pointers to it. Thread-safe.
  bool used_by_ops() const noexcept {
    return static_cast<int64_t>(pins()) > fixed_.load(std::memory_order_acquire);
  }

  Uses uses;

 private:
  Device& device_;
  const c10::StorageImpl* const storage_;
  std::atomic<int64_t> fixed_{0};
};

using EntityPtr = std::shared_ptr<Entity>;

/// Whether nobody holds the storage any more, of which at least a weak reference is left.
inline bool has_expired(const c10::StorageImpl& storage) noexcept {
  return c10::raw::weak_intrusive_ptr::use_count(const_cast<c10::StorageImpl*>(&storage)) == 0;
}

/// What the queues hold of it.
inline EntityPtr entity_of(const std::shared_ptr<EntityStorageImpl>& entity) {
  return std::static_pointer_cast<Entity>(entity);
}

} // namespace torch_lms
