#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>

#include <extension/Device.h>
#include <extension/MemoryPressure.h>
#include <extension/Pager.h>

namespace torch_lms {
namespace {

/// Before the allocator's pool grows: blocks whose page-out is over go back to it,
/// so that it need not. (`LimitedCudaAllocator` does the waiting and the choosing:
/// here the allocator's lock is held and the size is not known.)
class FinishedPageouts final : public c10::FreeMemoryCallback {
 public:
  bool Execute() override {
    if (!MemoryPressure::get().enabled() || !Pager::get().out_queue().has_finished()) {
      return false;
    }
    const Device* device = known_device(c10::Device(c10::kCUDA, c10::cuda::current_device()));
    if (device == nullptr) {
      return false; // Nothing of it has ever been paged.
    }
    Pager::get().commit_finished(device);
    return true;
  }
};

} // namespace
} // namespace torch_lms

namespace c10 {
REGISTER_FREE_MEMORY_CALLBACK("torch_lms_finished_pageouts", torch_lms::FinishedPageouts)
} // namespace c10
