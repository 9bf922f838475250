#pragma once

// The one place that knows how PyTorch versions differ.

#include <memory>
#include <utility>

#include <c10/core/StorageImpl.h>
#include <c10/core/impl/COWDeleter.h>
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

#if TORCH_LMS_TORCH_AT_LEAST(2, 13)

/// Whether raw mutable access to a storage can be noticed (torch 2.13 on).
constexpr bool kHasMaterializer = true;

inline bool has_materializer(const c10::StorageImpl& storage) {
  return storage.has_materializer();
}

/// Exchanges the storage's pointer for another, whatever hooks there are.
inline void swap_data_ptr(c10::StorageImpl& storage, c10::DataPtr& data) {
  std::swap(storage._mutable_data_ptr_no_checks(), data);
}

/// See Note [Watched blocks].
inline void watch_block(c10::StorageImpl& storage, Materializer materializer) {
  storage.set_materializer(materializer);
}
inline bool block_is_watched(c10::StorageImpl& storage) {
  // A copy-on-write storage has a hook, too, but no block of its own.
  return storage.has_materializer() &&
         storage._mutable_data_ptr_no_checks().get_deleter() != &c10::impl::cow::cow_deleter;
}
inline void unwatch_block(c10::StorageImpl& storage) {
  storage.clear_materializer();
}

/// Who asked for the address got an error; not any more.
inline void allow_access(c10::StorageImpl& storage) {
  storage.clear_data_ptr_access_error_msg_();
}

#else

constexpr bool kHasMaterializer = false;

inline bool has_materializer(const c10::StorageImpl&) {
  return false;
}

inline void swap_data_ptr(c10::StorageImpl& storage, c10::DataPtr& data) {
  c10::DataPtr before = std::move(storage._mutable_data_ptr_no_checks());
  storage.set_data_ptr_noswap(std::move(data)); // renews what PyTorch remembers of the pointer
  data = std::move(before);
}

inline void watch_block(c10::StorageImpl& storage, Materializer) {
  c10::DataPtr& data = storage._mutable_data_ptr_no_checks();
  if (data.get() != data.get_context()) {
    return;
  }
  void* block = data.get();
  const c10::Device device = data.device();
  auto* context = new c10::impl::cow::COWDeleterContext(
      std::unique_ptr<void, c10::DeleterFnPtr>(block, data.get_deleter()));
  data.release_context();
  storage.set_data_ptr_noswap(c10::DataPtr(block, context, &c10::impl::cow::cow_deleter, device));
}
inline bool block_is_watched(c10::StorageImpl& storage) {
  return storage._mutable_data_ptr_no_checks().get_deleter() == &c10::impl::cow::cow_deleter;
}
inline void unwatch_block(c10::StorageImpl& storage) {
  static_cast<void>(storage.mutable_data()); // the only owner's block becomes an ordinary one
}

/// A private member. An explicit instantiation may name it, and its friend hands it out.
template <typename Tag, typename Tag::Type Member>
struct Private {
  friend typename Tag::Type member_of(Tag) {
    return Member;
  }
};
struct ThrowsOnAccess {
  using Type = bool c10::StorageImpl::*;
  friend Type member_of(ThrowsOnAccess);
};
struct RefreshChecks {
  using Type = void (c10::StorageImpl::*)();
  friend Type member_of(RefreshChecks);
};
template struct Private<ThrowsOnAccess, &c10::StorageImpl::throw_on_immutable_data_ptr_>;
template struct Private<RefreshChecks, &c10::StorageImpl::refresh_has_data_ptr_check>;

inline void allow_access(c10::StorageImpl& storage) { // what later PyTorch has a method for
  storage.*member_of(ThrowsOnAccess{}) = false;
  (storage.*member_of(RefreshChecks{}))();
}

#endif

} // namespace compat
} // namespace torch_lms
