#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace torch_lms {

/// Ops that the calling thread runs while one of these lives are ours, not the program's: nobody
/// records them, and autograd, autocast, functorch and Python's modes do not see them.
class BelowAutograd {
 private:
  const at::DisableRecordFunctionGuard unseen_;
  const at::AutoDispatchBelowADInplaceOrView below_;
  const c10::impl::ExcludeDispatchKeyGuard no_modes_{
      c10::autocast_dispatch_keyset | c10::DispatchKeySet(
                                          {c10::DispatchKey::Python,
                                           c10::DispatchKey::PythonTLSSnapshot,
                                           c10::DispatchKey::PreDispatch,
                                           c10::DispatchKey::FuncTorchDynamicLayerFrontMode,
                                           c10::DispatchKey::FuncTorchDynamicLayerBackMode})};
};

} // namespace torch_lms
