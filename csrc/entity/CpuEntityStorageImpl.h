#pragma once

#include <entity/EntityStorageImpl.h>

namespace torch_lms {

/// An entity in main memory, paged out to a memory-mapped file. It differs from
/// its base in the backend alone, which must be a `CpuTransferBackend`.
class CpuEntityStorageImpl final : public EntityStorageImpl {
 public:
  using EntityStorageImpl::EntityStorageImpl;
};

} // namespace torch_lms
