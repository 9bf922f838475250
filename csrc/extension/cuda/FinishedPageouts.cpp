#include <c10/cuda/CUDACachingAllocator.h>

#include <extension/cuda/LimitedCudaAllocator.h>

namespace torch_lms {
namespace {

/// Before the allocator's pool grows: blocks whose page-out is over go back to it,
/// so that it need not. (`LimitedCudaAllocator` does the waiting and the choosing:
/// here the allocator's lock is held and the size is not known.)
class FinishedPageouts final : public c10::FreeMemoryCallback {
 public:
  bool Execute() override {
    return LimitedCudaAllocator::get().vacate_finished();
  }
};

} // namespace
} // namespace torch_lms

namespace c10 {
REGISTER_FREE_MEMORY_CALLBACK("torch_lms_finished_pageouts", torch_lms::FinishedPageouts)
} // namespace c10
