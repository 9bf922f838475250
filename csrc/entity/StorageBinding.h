#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <utility>

#include <entity/TransferBackend.h>

namespace torch_lms {

class EntityStorageImpl;

/// A block of device memory on its way into or out of a storage. Destroying it
/// gives the memory back to the device allocator.
class DeviceBlock {
 public:
  virtual ~DeviceBlock() = default;
  virtual void* data() const noexcept = 0;
};

/// Keeps something alive until destroyed (a strong reference to a storage).
using KeepAlive = std::shared_ptr<void>;

/// The tensor library's side of one entity: the storage whose bytes move.
///
/// Only `hold` and `acquire` look for the storage; all other methods need a
/// `KeepAlive` (or an op's own reference) to be held by the caller, and, where nothing else
/// is said, are called under the entity's lock, so they neither call the device's allocator
/// nor drop references. Whatever frees memory or may run a destructor is handed back
/// (`KeepAlive`, `DeviceBlock`) and let go of after unlocking.
class StorageBinding {
 public:
  virtual ~StorageBinding() = default;

  /// Keeps the storage alive; null if it is gone. Called without a lock.
  virtual KeepAlive hold() = 0;

  /// As `hold`, and remembers the storage's device block for `install_host`.
  /// Null if the storage does not hold a movable block of `nbytes` any more. Called under the
  /// entity's lock, where the caller holds the storage, if it is still there.
  virtual KeepAlive acquire(size_t nbytes, void** device) = 0;

  /// Whether the storage is gone for good. Called with or without a lock.
  virtual bool expired() = 0;

  /// The address that the storage holds now.
  virtual const void* address() = 0;

  /// Whether anybody holds the storage but one `KeepAlive`, the caller's or a transfer's. A second
  /// one counts as somebody.
  virtual bool referenced() = 0;

  /// Points the storage at `host` and returns the device block it held.
  /// Returns null, and changes nothing, if it no longer holds the block that
  /// `acquire` saw.
  virtual std::unique_ptr<DeviceBlock> install_host(
      void* host,
      const std::shared_ptr<EntityStorageImpl>& entity) = 0;

  /// Allocates a device block for the storage. Called without a lock, may be
  /// called when the storage is gone. Throws what the device allocator throws.
  virtual std::unique_ptr<DeviceBlock> allocate(size_t nbytes) = 0;

  /// Behind what may still use a block from `allocate`, which was somebody else's before. Here: all
  /// that has been submitted. Called without a lock.
  virtual FencePtr block_is_free(TransferBackend& backend) {
    return backend.submitted_work();
  }

  /// A block from `allocate`, or from a recipe, is about to be the storage's: any stream may use it
  /// from now on, where that has to be told. Until then it can go back and is free at once. Called
  /// without a lock.
  virtual void keep_block_for_streams(const DeviceBlock& /*block*/) {}

  /// Points the storage, which holds the host copy, at `block`, and takes it. Cannot fail.
  virtual void install_device(std::unique_ptr<DeviceBlock> block) = 0;

  /// Gives the storage, which has just been acquired, `block` for its own, which `block` is
  /// afterwards. Returns false, and changes nothing, where that cannot be.
  virtual bool exchange(std::unique_ptr<DeviceBlock>& /*block*/) {
    return false;
  }

  /// From now on raw mutable access to the storage calls `access` (where the
  /// tensor library can do that).
  virtual void watch() = 0;
  virtual void unwatch() = 0;

  /// `install_device`, and from now on tells by `unwritten` whether anybody has had the chance
  /// to write to the block. Returns false where the tensor library cannot tell, or finds no memory
  /// to do so; the block is installed all the same. Cannot fail: half of it cannot be undone.
  virtual bool install_watched(std::unique_ptr<DeviceBlock> block) {
    unwatch();
    install_device(std::move(block));
    return false;
  }
  virtual bool unwritten() {
    return false;
  }

  /// Until `install_device`, whoever asks for the storage's address gets an error with this text
  /// (where the tensor library can do that): there is nothing behind it.
  virtual void refuse(const std::string& /*why*/) {}

  /// A cancelled copy still reads the storage's block: its memory must not be
  /// unmapped before the copy has finished. Calls the device's allocator, so it is called
  /// without a lock, for an entity that is pinned.
  virtual void keep_block_for_copy() = 0;

  /// The same for the copy of a page-in, which still writes to the storage's block.
  virtual void keep_block_for_arrival() {
    keep_block_for_copy();
  }

  /// Whether the calling thread submits to the stream that the storage's blocks are
  /// allocated for. Called with or without a lock.
  virtual bool on_home_stream() {
    return true;
  }
};

} // namespace torch_lms
