#pragma once

#include <memory>

#include <entity/StorageBinding.h>
#include <entity/TransferBackend.h>

namespace torch_lms {

/// How a storage's bytes can be made again. Belongs to the entity while that is dropped; holds
/// what it needs, so the entity lets go of it without a lock.
class Recipe {
 public:
  virtual ~Recipe() = default;

  /// Makes the bytes, in a block of their own. `done`: after what other streams have to be
  /// ordered to use them; null if nothing is under way. Called without a lock, by one thread at a
  /// time, on a thread that runs ops. Throws where it cannot; it can be called again then.
  virtual std::unique_ptr<DeviceBlock> make(FencePtr* done) = 0;
};

} // namespace torch_lms
