#pragma once

#include <entity/EntityStorageImpl.h>

namespace torch_lms {

/// An entity of a CUDA device, paged out to pinned host memory. It differs from
/// its base in the backend alone, which must be a `CudaTransferBackend`.
class CudaEntityStorageImpl final : public EntityStorageImpl {
 public:
  using EntityStorageImpl::EntityStorageImpl;
};

} // namespace torch_lms
