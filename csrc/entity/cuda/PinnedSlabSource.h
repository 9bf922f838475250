#pragma once

#include <entity/SlabSource.h>

namespace torch_lms {

/// Slabs of main memory that every CUDA device can address: mapped with huge
/// pages where the system has them, touched by several threads, registered once.
/// (Registering touched memory is several times faster than cudaHostAlloc, and
/// PyTorch's own pinned allocator rounds sizes up to powers of two.)
class PinnedSlabSource final : public SlabSource {
 public:
  /// `slab_bytes`: the preferred size of a slab.
  explicit PinnedSlabSource(size_t slab_bytes);

  Slab acquire(size_t nbytes) override;
  void release(Slab& slab) noexcept override;
  const char* name() const noexcept override {
    return "pinned host memory";
  }
  size_t slab_bytes() const noexcept override {
    return slab_bytes_;
  }

 private:
  const size_t slab_bytes_;
  AnonymousSlabSource memory_;
};

} // namespace torch_lms
