#pragma once

// The one place that knows how PyTorch versions differ.

#include <c10/core/StorageImpl.h>
#include <torch/headeronly/version.h>

#define TORCH_LMS_TORCH_AT_LEAST(major, minor) \
  (TORCH_VERSION_MAJOR > (major) ||            \
   (TORCH_VERSION_MAJOR == (major) && TORCH_VERSION_MINOR >= (minor)))

#if !TORCH_LMS_TORCH_AT_LEAST(2, 11)
#error "torch-lms needs PyTorch 2.11 or later; for 1.12 and 1.13 use the patched fork"
#endif

namespace torch_lms {
namespace compat {

using Materializer = void (*)(c10::StorageImpl*);

/// Whether raw mutable access to a storage can be noticed (torch 2.13 on).
constexpr bool kHasMaterializer = TORCH_LMS_TORCH_AT_LEAST(2, 13);

inline bool has_materializer([[maybe_unused]] const c10::StorageImpl& storage) {
#if TORCH_LMS_TORCH_AT_LEAST(2, 13)
  return storage.has_materializer();
#else
  return false;
#endif
}

inline void set_materializer(
    [[maybe_unused]] c10::StorageImpl& storage,
    [[maybe_unused]] Materializer materializer) {
#if TORCH_LMS_TORCH_AT_LEAST(2, 13)
  storage.set_materializer(materializer);
#endif
}

inline void clear_materializer([[maybe_unused]] c10::StorageImpl& storage) {
#if TORCH_LMS_TORCH_AT_LEAST(2, 13)
  storage.clear_materializer();
#endif
}

} // namespace compat
} // namespace torch_lms
